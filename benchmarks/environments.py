"""What the benchmarks share: mergekit in its own environment, children that are measured, tables, and where we ran.

Imports nothing heavy: Linux counts the memory of whoever starts a child into the child's peak, so the parent stays
small.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from orthomerge.core.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MERGEKIT, TORCH = "0.1.5", "2.13.0"
_POLL = 0.005  # seconds between two looks at a child's memory


@dataclass(frozen=True)
class Usage:
    """What one run of a command cost: seconds, and bytes at the peak. `anonymous`: without pages of mapped files."""

    wall: float
    cpu: float
    rss: int
    anonymous: int


def ensure_mergekit(folder: Path = ROOT / ".venv-mergekit") -> Path:
    """The `bin` of an environment with mergekit, made with pip if it is not there."""
    python = folder / "bin" / "python"
    if _installed(python, "mergekit") != MERGEKIT:
        print(f"installing mergekit {MERGEKIT} into {folder} (some minutes, once)", flush=True)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, f"torch=={TORCH}"], check=True)
        subprocess.run([*pip, f"mergekit=={MERGEKIT}"], check=True)
    return folder / "bin"


def _installed(python: Path, package: str) -> str | None:
    """The version of a package in another environment, None where there is none."""
    if not python.exists():
        return None
    code = f"from importlib.metadata import version; print(version({package!r}))"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def offline(source: Path | None = None) -> dict[str, str]:
    """The environment of a child: as here, but without the network. `source`: the orthomerge that it imports.

    Python keeps compiled modules, as it does for users: compiling them takes longer than a small command.
    """
    path = {} if source is None else {"PYTHONPATH": str(source)}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **path}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


@contextmanager
def source_of(name: str, folder: Path) -> Iterator[Path]:
    """The `src` of a commit, as a git worktree in `folder` that is removed afterwards."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--force", "--detach", str(folder), name], check=True)
    try:
        yield folder / "src"
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def measure(command: Sequence[str | Path], *, source: Path | None = None) -> Usage:
    """Run a command to its end and measure what it costs; if it fails, the error ends with its last output."""
    words = [str(word) for word in command]
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        child = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=offline(source))
        anonymous = 0
        while True:
            pid, status, used = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            anonymous = max(anonymous, _anonymous(child.pid))
            time.sleep(_POLL)
        wall = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait for it again
        if child.returncode:
            output.seek(0)
            last = output.read().decode(errors="replace")[-2000:]
            raise SystemExit(f"{' '.join(words)}\nfailed with exit code {child.returncode}:\n{last}")
    return Usage(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, anonymous)


def _anonymous(pid: int) -> int:
    """Memory of a process that is no copy of a file, now; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("RssAnon:")), "RssAnon: 0 kB")
    return int(line.split()[1]) * 1024


def commit() -> str:
    """The commit that is measured; says so if the source was changed since.

    On a machine that has the source without its history, or with an older one, ORTHOMERGE_COMMIT tells.
    """
    if told := os.environ.get("ORTHOMERGE_COMMIT"):
        return told
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + (" with uncommitted changes" if changed.stdout.strip() else "")


def describe_run(*, mergekit: Path | None = None) -> str:
    """Command, commit, machine and versions, as a list."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packages = ("torch", "numpy")
    lines = {
        "command": f"`python {' '.join((Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix(), *sys.argv[1:]))}`",
        "commit": commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{cpus[0].partition(': ')[2] if cpus else platform.machine()}, {os.cpu_count()} cores, "
        f"{memory / 2**30:.0f} GiB, Linux {platform.release()}, load {os.getloadavg()[0]:.1f} at the start"
        f"{_accelerator()}",
        "versions": ", ".join(
            (
                f"Python {platform.python_version()}",
                f"orthomerge {VERSION}",
                *(f"{name} {version(name)}" for name in packages),
            )
        ),
    }
    if mergekit is not None:
        theirs = (f"{name} {_installed(mergekit / 'python', name)}" for name in ("mergekit", "torch", "transformers"))
        lines["mergekit's environment"] = ", ".join(theirs)
    return "\n".join(f"- {name}: {text}" for name, text in lines.items())


def _accelerator() -> str:
    """The GPU, if whoever runs this has loaded torch and there is one."""
    torch = sys.modules.get("torch")
    return f"; {torch.cuda.get_device_name()}" if torch is not None and torch.cuda.is_available() else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up in a terminal too."""
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join((line(header), line(["-" * width for width in widths]), *(line(row) for row in rows)))


def write_result(name: str, sections: Mapping[str, str]) -> Path:
    """Write `benchmarks/results/NAME.md`: headings and what stands under them."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.md"
    path.write_text("\n\n".join(f"{heading}\n\n{text}" for heading, text in sections.items()) + "\n", encoding="utf-8")
    return path
