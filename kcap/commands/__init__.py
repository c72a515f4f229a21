"""The subcommands of `kcap`, one file each: options in, exit code out. What they do lies in the packages beside."""
