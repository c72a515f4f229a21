"""What is wrong with files of the formats that kcap knows: `formats` has an entry for each."""
