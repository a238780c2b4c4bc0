"""Digests of short trainings, to tell whether a change of the code has changed any number.

    python -m tests.digests OUT.json                   train each row of the table, write digests
    python -m tests.digests --compare A.json B.json    print what differs
    python -m tests.digests --checkpoints FOLDER       save the default rows in mid-training
    python -m tests.digests --resume FOLDER OUT.json   train these to the end, write digests

On the CPU, in float32 and one thread; comparable on one machine with one version of PyTorch. Only
names of ``fst`` itself are used, so that the script outlives the modules behind them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fst
from fst.baselines.channel_removal import fit_channels
from tests.strategy_settings import DEFAULTS, SETTINGS

STEPS, SAVED_AT = 5, 3
PLANNED = 40  # steps of the training that these are the first of: schedules need some
EVENTFUL = {  # for the default rows that do nothing within so few steps
    "tsm-interval2": lambda: fst.get_strategy("tsm", interval=2),
    "dpf-interval2": lambda: fst.get_strategy("dpf", interval=2),
    "rigl-interval2": lambda: fst.get_strategy("rigl", interval=2),
    "resprop-threshold": lambda: fst.get_strategy("resprop", threshold=0.01, density=0.3),
    "prunetrain-removal": lambda: fst.get_strategy("prunetrain", interval=1, threshold=0.75),
}
ROWS = {row.id: row.build for row in SETTINGS} | EVENTFUL
SAVED_ROWS = [row.id for row in DEFAULTS] + list(EVENTFUL)


class Net(nn.Module):
    """Awkward layers for images of 13 x 11; if ``tied``, two of them share one Parameter."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 3, padding=1, padding_mode="circular")
        self.strided = nn.Conv2d(10, 13, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(13)
        self.point = nn.Conv2d(13, 38, 1, bias=False)
        self.grouped = nn.Conv2d(38, 10, 3, padding=1, groups=2)
        self.twice = nn.Conv2d(10, 10, 3, padding=2, dilation=2)
        self.before = nn.Conv2d(10, 10, (1, 3), padding=(0, 1))
        self.after = nn.Conv2d(10, 10, (1, 3), padding=(0, 1), stride=(2, 1))
        self.head = nn.Linear(10, 5)
        for weight in (p for p in self.parameters() if p.dim() > 1):
            nn.init.kaiming_normal_(weight)  # so that gradients reach the stem
        if tied:
            self.after.weight = self.before.weight

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.strided(self.stem(images).relu())).relu()
        x = self.grouped(self.point(x)).relu()
        x = self.twice(self.twice(x).relu()).relu()
        x = self.after(self.before(x).relu()).relu()
        return self.head(x.flatten(2).transpose(1, 2)).mean(1)


class Training:
    """The training of one row, from its beginning or from a checkpoint."""

    def __init__(self, row: str) -> None:
        strategy = ROWS[row]()
        # schedules refuse tied weights
        self.network = "tied" if strategy.schedule is None else "untied"
        torch.manual_seed(0)
        self.model = Net(tied=self.network == "tied")
        fst.convert(self.model, strategy, include=[nn.Conv2d, nn.Linear])
        fst.seed_random_rules(self.model, seed=1)
        kind = torch.optim.Adam if strategy.name == "step" else torch.optim.SGD  # it needs Adam
        options = {} if strategy.name == "step" else {"momentum": 0.9}
        self.optimizer = kind(self.model.parameters(), lr=0.05, **options)
        lengths = {"total_steps": PLANNED, "steps_per_epoch": 2}
        self.attachment = fst.attach(self.model, self.optimizer, **lengths)
        self.losses: list[str] = []

    def loss(self, step: int) -> Tensor:
        """The loss of a batch of its own for each step; every other one is channels_last."""
        generator = torch.Generator().manual_seed(step)
        layout = torch.channels_last if step % 2 else torch.contiguous_format
        images = torch.randn(3, 3, 13, 11, generator=generator).to(memory_format=layout)
        classes = torch.randint(5, (3,), generator=generator)
        loss = nn.functional.cross_entropy(self.model(images), classes, reduction="sum")
        self.losses.append(loss.item().hex())
        return loss

    def train(self, until: int) -> None:
        for step in range(len(self.losses), until):
            self.optimizer.zero_grad()
            loss = self.loss(step)
            self.attachment.report_loss(loss)
            loss.backward()
            self.optimizer.step()

    def load(self, state: Mapping[str, Any]) -> None:
        fit_channels(self.model, state["model"], self.optimizer)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        fst.load_sparsity_state(self.model, state["sparsity"])
        self.losses = list(state["losses"])

    def record(self) -> dict[str, Any]:
        """Digests, and the losses of all steps and of one more batch in evaluation."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        record = {
            "network": self.network,
            "weights": digest(parameters | dict(self.model.named_buffers())),
            "gradients": digest({name: p.grad for name, p in parameters.items()}),
            "state": digest(_state(self.model)),
            "masks": digest({n: m.output_mask() for n, m in fst.sparse_layers(self.model).items()}),
        }
        self.model.eval()
        with torch.no_grad():
            self.loss(STEPS)
        return record | {"losses": self.losses}


def _state(model: nn.Module) -> dict[str, Any]:
    """The sparsity state without the record of backends, which has times."""
    state = fst.sparsity_state(model)
    return {name: {**entry, "record": None} for name, entry in state.items()}


def digest(value: Any) -> str:
    """The sha256 of tensors and plain data, nested in any way."""
    return hashlib.sha256(b"\0".join(_parts(value))).hexdigest()


def _parts(value: Any) -> Iterable[bytes]:
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield f"{len(value)} entries".encode()
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _parts(value[key])
    elif value is None or isinstance(value, bool | int | float | str):
        yield repr(value).encode()
    else:
        raise TypeError(f"{value!r:.200} is no plain data.")


def write_digests(rows: Iterable[str], out: Path, folder: Path | None = None) -> None:
    """Train ``rows`` to their end, from the checkpoints in ``folder`` if there is one."""
    records = {}
    for row in rows:
        training = Training(row)
        if folder is not None:
            training.load(torch.load(folder / f"{row}.pt", weights_only=True))
        training.train(until=STEPS)
        records[row] = training.record()
    out.write_text(json.dumps(records, indent=1) + "\n")


def write_checkpoints(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for row in SAVED_ROWS:
        training = Training(row)
        training.train(until=SAVED_AT)
        state = {
            "model": training.model.state_dict(),
            "sparsity": fst.sparsity_state(training.model),
            "optimizer": training.optimizer.state_dict(),
            "losses": training.losses,
        }
        torch.save(state, folder / f"{row}.pt")


def compare(a: Path, b: Path) -> int:
    """Print what differs in the rows that both files have; 1 if anything does."""
    first, second = json.loads(a.read_text()), json.loads(b.read_text())
    both = [row for row in first if row in second]
    differing = [row for row in both if first[row] != second[row]]
    for row in differing:
        print(f"{row}:", *(k for k, v in first[row].items() if second[row].get(k) != v))
    if alone := sorted(first.keys() ^ second.keys()):
        print(f"{len(alone)} rows are in one file alone:", *alone)
    print(f"{len(differing)} rows differ" if differing else f"{len(both)} rows equal")
    return int(bool(differing) or not both)


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    match arguments:
        case ["--compare", a, b]:
            return compare(Path(a), Path(b))
        case ["--checkpoints", folder]:
            write_checkpoints(Path(folder))
        case ["--resume", folder, out]:
            write_digests(SAVED_ROWS, Path(out), folder=Path(folder))
        case [out] if not out.startswith("-"):
            write_digests(ROWS, Path(out))
        case _:
            sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
