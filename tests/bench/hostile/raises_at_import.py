# definition: relu
# does: Raises what is no Exception at its import.
# expect: COMPILE_ERROR RUNTIME_ERROR
# reason: enough
class Enough(BaseException):
    pass


raise Enough("enough")


def run(x):
    return x
