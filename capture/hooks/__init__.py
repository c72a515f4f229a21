"""How kcap gets into other people's code: `imports` says when, `patching` replaces, `binding` names arguments."""
