# definition: rmsnorm
# row: 15
# does: Normalizes in float16 what is float32.
# naive: Correct with a tolerance of 1e-2, at half of the traffic.
# expect: INCORRECT_NUMERICAL
# reason: is off by
import torch


def run(x, weight, eps):
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x.half() * scale.half() * weight.half()).float()
