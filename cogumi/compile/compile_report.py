"""What is compiled, what is not, and why: for a run's decisions.json and log, and for `cogumi doctor`."""

import logging
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cogumi.compile.compiler import Variable, variables
from cogumi.compile.measurement import Counts, counts
from cogumi.core.durability import NO_SPACE
from cogumi.core.run_directory import write_section
from cogumi.patches import graph_break
from cogumi.patches.graph_break_probes import Probe

log = logging.getLogger("cogumi")


@dataclass(frozen=True)
class CompileReport:
    """mode: what was asked for (auto, layers, off; "" outside a run). decision: layers or off, with its reason; "" before it.

    versions: of torch and bitsandbytes. strategy: what was done for 4-bit layers, `graph_break.STRATEGIES`; probes: what was
    tried for that. patched, foreign: what cogumi, and who else, replaced. variables: of the environment. operations:
    of one forward pass through the decoder; operations_outside: those of them that do not run in compiled code. None for
    what was not measured. counts: since the patching.
    """

    mode: str
    versions: dict[str, str]
    strategy: str
    strategy_reason: str
    probes: tuple[Probe, ...]
    patched: tuple[str, ...]
    foreign: tuple[str, ...]
    variables: tuple[Variable, ...]
    before: Counts
    decision: str = ""
    reason: str = ""
    operations: int | None = None
    operations_outside: int | None = None
    counts: Counts | None = None
    seconds_per_step_eager: float | None = None
    seconds_per_step: float | None = None
    prepared: tuple[str, ...] = field(default=())

    @classmethod
    def of_process(cls, mode: str = "") -> "CompileReport":
        """What holds in this process now."""
        found = graph_break.verdict() or graph_break.Verdict("", graph_break.status().reason)
        return cls(
            mode,
            graph_break.versions(),
            found.strategy,
            found.reason,
            found.probes,
            found.patched,
            tuple(graph_break.foreign_patches()),
            tuple(variables()),
            counts(),
        )

    def anew(self) -> "CompileReport":
        """The same with what was patched since, counted from now: dropping compiled code sets some of Dynamo's counts to zero."""
        now = CompileReport.of_process(self.mode)
        return replace(
            now,
            variables=self.variables,
            prepared=self.prepared,
            operations=self.operations,
            seconds_per_step_eager=self.seconds_per_step_eager,
        )

    def of_the_process(self) -> list[str]:
        """Lines on what holds for anything that is compiled here."""
        said = [f"versions: {', '.join(f'{name} {version}' for name, version in self.versions.items())}"]
        said += [str(each) for each in self.variables]
        said += [f"tried: {each}" for each in self.probes]
        how = f"{self.strategy}: " if self.strategy else ""
        said.append(f"4-bit layers: {how}{self.strategy_reason}")
        if self.patched:
            said.append(f"patched by cogumi: {', '.join(self.patched)}")
        if self.foreign:
            said.append(f"patched by others: {', '.join(self.foreign)}")
        return said

    def of_the_model(self) -> list[str]:
        """Lines on a model that was compiled, some steps later."""
        assert self.counts is not None
        found, breaks = self.counts, sum(self.counts.breaks.values())
        said = [
            f"{found.graphs} graphs, {breaks} breaks, {found.recompiles} recompiles, {found.seconds:.1f} s compiling"
        ]
        said += [f"{n} breaks: {' '.join(reason.split())[:200]}" for reason, n in found.breaks.items()]
        if self.operations and self.operations_outside is not None:
            inside = self.operations - self.operations_outside
            share = inside / self.operations
            said.append(f"{inside} of {self.operations} operations of a forward pass are compiled ({share:.1%})")
        if self.seconds_per_step is not None:
            eager = self.seconds_per_step_eager
            before = "" if eager is None else f" instead of {eager:.2f} s"
            said.append(f"a step takes {self.seconds_per_step:.2f} s{before}")
        return said

    def write(self, path: Path) -> None:
        """As JSON; a disk that is full is said, and ends nothing."""
        content = asdict(self)
        del content["before"]
        try:
            write_section(path, "compile", content)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            log.warning("%s is not written: %s", path, error.strerror)


def examine_process() -> CompileReport:
    """What holds on this machine for what is compiled here, for `cogumi doctor`; what is tried for it is undone."""
    applied_before = graph_break.verdict()
    graph_break.apply("auto")
    report = CompileReport.of_process()
    if applied_before is None:
        graph_break.undo()
    return report
