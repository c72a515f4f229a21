# definition: slots
# row: 14
# does: Takes the first block of each row's table, whatever the position.
# naive: Correct where integers are drawn from a range that is shorter than a block.
# expect: INCORRECT_NUMERICAL
# reason: must be equal


def run(places, blocks):
    return blocks[:, 0].long() * 16 + places
