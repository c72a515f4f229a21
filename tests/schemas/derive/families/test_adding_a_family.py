"""schemas/README.md, "Adding a family": the family that it prints is copied and used, and so are its commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[4] / "schemas" / "README.md"

USE = """
import sys, types, torch

from kcap.schemas.derive import families
from kcap.schemas.derive.bound_call import BoundCall
from kcap.schemas.derive.cost import CostInputs
from kcap.schemas.derive.workload_draft import WorkloadDraft
from kcap.schemas.derive.invocation import Invocation
from kcap.schemas.recording.records import Argument
from kcap.schemas.recording.values import TensorSpec

module = types.ModuleType("kcap.schemas.derive.families.gather")
sys.modules[module.__name__] = module
exec(compile(open(sys.argv[1]).read(), "gather.py", "exec"), vars(module))
sys.path.insert(0, sys.argv[2])
from agreement import agrees, declined

logprobs, ids = torch.randn(3, 50), torch.randint(0, 50, (3, 4))
kernel = agrees("aten::gather", torch.ops.aten.gather, self=logprobs, dim=1, index=ids)
assert (kernel.family, kernel.name) == ("gather_logprobs", "gather_logprobs_v50")
assert declined("aten::gather", self=logprobs, dim=0, index=ids)

definition = kernel.definition()
cost = families.cost_function_for(definition.op_type)(CostInputs(definition, {"logprobs": logprobs, "token_ids": ids}))
assert cost.bytes == kernel.touched() == 2 * 12 * 4 + 12 * 8, cost

(rule,) = families.input_rules_for(definition.op_type, "token_ids")
draft = WorkloadDraft(definition, {"batch_size": 3, "num_tokens": 4}, {}, torch.Generator(), lambda draft, name: None)
assert rule(draft, "token_ids").shape == (3, 4) and int(rule(draft, "token_ids").max()) < 50

args = [TensorSpec((3, 50), "float32"), 1, TensorSpec((3, 4), "int64", storage=1)]
bound = BoundCall("aten::gather", [Argument(name=n, value=v) for n, v in zip(("self", "dim", "index"), args)])
replay = families.replay_rule_for(bound.operator)
replay.prepare(bound)
assert int(bound.content("index").max()) < 50
assert replay.touched(bound, 3 * 50 * 4 + 12 * 8) == 3 * 4 * 4 + 12 * 8
"""


def test_the_family_of_the_readme_works_as_it_is(tmp_path: Path) -> None:
    section = README.read_text().split("## Adding a family")[1]
    source, test = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "gather.py").write_text(source)
    program = f"{USE}\n{test}\ntest_gathers_from_whole_rows()\n"
    command = [sys.executable, "-c", program, str(tmp_path / "gather.py"), str(Path(__file__).parent)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
