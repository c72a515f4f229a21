from torchvision.transforms import InterpolationMode as InterpolationMode


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
