"""Jobs as Ray tasks, on this machine or a cluster: only the run folder's path and keys travel, tensors stay on disk."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orthomerge.errors import OrthomergeError
from orthomerge.running.jobs.executors import RETRIES, Order, failed, told_failure
from orthomerge.running.jobs.job import Job
from orthomerge.running.jobs.store import Done
from orthomerge.running.watching import Watch
from orthomerge.strict import build

__all__ = ["Ray"]

_AHEAD = 4  # tasks under way for each worker that Ray has


@dataclass(frozen=True)
class Ray:
    """`workers`: of a Ray that is started here, all cores if None; `address`: of one that runs, `ray://host:port`."""

    workers: int | None = None
    address: str | None = None

    def map(self, run: Path, jobs: Sequence[Job], watch: Watch) -> dict[str, Done]:
        order = Order(run, jobs, watch)
        if not len(order):
            return order.done
        with self._started() as ray:
            task = ray.remote(num_cpus=1, max_retries=RETRIES)(_do)
            most = _AHEAD * max(int(ray.cluster_resources().get("CPU", 1)), 1)
            under_way: dict[Any, str] = {}
            while len(order):
                while len(under_way) < most and (key := order.take()) is not None:
                    under_way[task.remote(os.path.abspath(run), key)] = key
                ready, _ = ray.wait(list(under_way), num_returns=1)
                for reference in ready:
                    key = under_way.pop(reference)
                    order.finish(key, self._result(ray, reference, key, order))
        return order.done

    def _result(self, ray: Any, reference: Any, key: str, order: Order) -> Done:
        try:
            answer = ray.get(reference)
        except ray.exceptions.RayTaskError:
            raise  # a defect of ours
        except ray.exceptions.RayError as error:
            raise OrthomergeError(
                f"the job {order.title(key)!r} ({key[:12]}) was tried {RETRIES + 1} times and its Ray worker was lost "
                f"each time ({type(error).__name__}: {str(error).strip().splitlines()[0]}); is there enough "
                "memory? Run again with fewer workers, or --on serial"
            ) from error
        if "failed" in answer:
            raise failed(answer["failed"])
        return build(Done, answer["done"], where=f"job {key[:12]}")

    @contextmanager
    def _started(self) -> Iterator[Any]:
        """Ray, connected; one that was started here ends here."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import ray
        except ImportError as error:
            raise OrthomergeError(
                "jobs on Ray need the package 'ray', which is not installed: pip install 'orthomerge[ray]'; or use "
                "--on process"
            ) from error
        if ray.is_initialized():
            yield ray
            return
        given: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "address": self.address or "local"}
        if self.address is None:  # a Ray of our own, whatever else runs on this machine
            given |= {"num_cpus": self.workers, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ray.init(**given)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            where = "here" if self.address is None else f"at {self.address}"
            raise OrthomergeError(
                f"cannot reach Ray {where}: {error}; start it and, where it asks for a token, set RAY_AUTH_MODE and "
                "RAY_AUTH_TOKEN, or use --on process"
            ) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _do(run: str, key: str) -> dict[str, Any]:
    """One job in a Ray worker; an error of ours comes back as data, so that its class and words stay."""
    from orthomerge.running.jobs.doing import do

    try:
        return {"done": asdict(do(Path(run), key))}
    except OrthomergeError as error:
        return {"failed": told_failure(error)}
