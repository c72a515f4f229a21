# definition: relu
# does: Captures a CUDA graph over buffers of its own, and copies the inputs in and the output out in every call.
import torch

GRAPHS = {}


def captured(x):
    given = x.clone()
    made = torch.relu(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = torch.relu(given)
    return graph, given, made


def run(x):
    if torch.cuda.is_current_stream_capturing():
        return torch.relu(x)
    if x.shape not in GRAPHS:
        GRAPHS[x.shape] = captured(x)
    graph, given, made = GRAPHS[x.shape]
    given.copy_(x)
    graph.replay()
    return made.clone()
