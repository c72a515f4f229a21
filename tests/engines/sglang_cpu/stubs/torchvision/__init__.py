"""An importable torchvision for machines without a build that fits their torch: text models never call it."""

__version__ = "0.0.0+stub"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
