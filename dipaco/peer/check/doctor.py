"""`dipaco-peer --check`: looks at machine and swarm, and says line by line what would go wrong.

Nothing is joined, claimed or written.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, replace

from dipaco.base.errors import ConfigurationError, DipacoError, StorageError, printable
from dipaco.dht.dht_node import check_shared_memory
from dipaco.modules.base_source import seems_in_hub_cache
from dipaco.modules.device import choose_device, limit_memory
from dipaco.modules.frozen_file import base_file_bytes
from dipaco.modules.layout import parameter_counts
from dipaco.modules.memory import least_pass_bytes
from dipaco.peer.exchange.files.contribution_files import MAX_CONTRIBUTIONS_BYTES
from dipaco.peer.owner.gpu_heat import thermometer_of
from dipaco.peer.peer_settings import PeerSettings
from dipaco.protocol.identity import is_in_use
from dipaco.protocol.plan import RunPlan, ShardIndex

from . import checks as c
from . import needs
from . import this_machine as m
from .swarm import SwarmReport, ask_neighbours, ask_swarm, ports_taken

SIGNS = {"ok": "ok     ", "warning": "WARNING", "problem": "PROBLEM"}


def run_doctor(settings: PeerSettings) -> int:
    """Check everything, print it, and return the exit code of the first problem, 0 if none."""
    found: list[c.Check] = []
    for check in examine_all(settings):
        found.append(check)
        if not settings.json:
            print(shown(check), flush=True)
    if settings.json:
        print(json.dumps({"checks": [asdict(check) for check in found], **summary(found)}))
    else:
        print(closing_line(found))
    sys.stdout.flush()
    return int(summary(found)["exit_code"])


def shown(check: c.Check) -> str:
    """Return the line of a check."""
    line = f"{SIGNS[check.verdict]} {check.name}: {check.value}"
    return printable(f"{line} -> {check.remedy}" if check.remedy else line)


def summary(found: list[c.Check]) -> dict[str, int]:
    """Count, and say how the command ends."""
    problems = [check for check in found if check.verdict == "problem"]
    return {
        "problems": len(problems),
        "warnings": sum(check.verdict == "warning" for check in found),
        "exit_code": problems[0].exit_code if problems else 0,
    }


def closing_line(found: list[c.Check]) -> str:
    """Return the last line."""
    counts = summary(found)
    if counts["problems"]:
        return f"{counts['problems']} of {len(found)} checks found a problem; begin with the first"
    if counts["warnings"]:
        return f"a peer can run here; {counts['warnings']} of {len(found)} checks warn"
    return "a peer can run here"


def examine_all(settings: PeerSettings) -> Iterator[c.Check]:
    """Yield every check as soon as it is made. What needs CUDA comes last: it must not fork."""
    system = m.look_at_system()
    yield c.check_system(system)
    yield c.check_versions(m.look_at_versions())
    yield c.check_open_files(m.look_at_open_files())
    yield c.check_sharing(failure_of(check_shared_memory))
    is_running = is_in_use(settings.identity_path or settings.cache_folder / "identity.key")
    yield from c.check_cache_is_free(settings.cache_folder, is_running)
    taken = ports_taken(settings.listen_maddrs())
    yield c.check_ports(settings.listen_maddrs(), taken, peer_is_running=is_running)
    report = yield from _swarm_checks(settings, system, port_is_free=not taken)
    yield from _machine_checks(settings, system, report.plan, report.shards)


def failure_of(check: Callable[[], None]) -> DipacoError | None:
    """Return what a check raises."""
    try:
        check()
    except DipacoError as error:
        return error
    return None


def _swarm_checks(
    settings: PeerSettings, system: m.System, *, port_is_free: bool
) -> Generator[c.Check, None, SwarmReport]:
    """Yield what the swarm says, and return the report, which is empty when nothing was found."""
    if not settings.initial_peers:
        yield c.ok("swarm", "no address was given: only this machine is checked")
        return SwarmReport()
    try:
        findings = ask_neighbours(settings)
    except DipacoError as error:
        yield c.problem("network", str(error), "start again with --debug", type(error))
        return SwarmReport()
    answers = [(f.address, "" if f.hello else str(f.error)) for f in findings]
    yield c.check_neighbours(answers)
    answered = [finding for finding in findings if finding.hello is not None]
    if not answered:
        return SwarmReport()
    offset_s = statistics.median(finding.clock_offset_s for finding in answered)
    clock = c.check_clock(offset_s, len(answered), system)
    yield clock
    if clock.verdict == "problem":
        return SwarmReport()
    report = ask_swarm(settings, port_is_free=port_is_free)
    if report.plan is None:
        assert report.failure is not None
        yield c.problem("run", str(report.failure), "ask the operator", type(report.failure))
        return report
    plan = report.plan
    yield c.ok("run", f"'{plan.name}' ({plan.run_id}), {needs.grid_of(plan).path_count} paths")
    if port_is_free:
        yield c.check_reachability(report.addresses, report.reachable, settings.port or 0, system)
    yield c.check_line(needs.round_mbit_per_s(plan, needs.grid_of(plan)))
    if plan.base_source is not None:
        yield c.check_base(
            plan.base_source.name,
            base_file_bytes(plan.model),
            is_in_hub_cache=seems_in_hub_cache(plan.base_source),
        )
    return report


def fitting_batch(settings: PeerSettings, plan: RunPlan, shards: ShardIndex) -> int | None:
    """Return how many sequences a peer has on the device at once; None: the trainer finds out.

    Raises what `--check` calls a problem, so that nothing is claimed that does not fit. Called when
    the peer's programs run already.
    """
    for check in _machine_checks(settings, m.look_at_system(), plan, shards, programs_bytes=0):
        if check.verdict == "problem":
            kind = StorageError if check.exit_code == StorageError.exit_code else ConfigurationError
            raise kind(f"{check.name}: {check.value}; {check.remedy}")
    if settings.micro_batch_size is not None or m.look_at_device(settings.device)[0] is not None:
        return settings.micro_batch_size
    need = memory_need(plan, settings, None, 0)
    # Never fewer than one: others may have taken memory since it was looked at.
    return max(1, need.fitting(m.look_at_memory().available - need.main_bytes))


def contributions_limit(settings: PeerSettings, plan: RunPlan, shards: ShardIndex) -> int:
    """Return how many bytes contributions may take, so that all is within `--max-disk-gb`."""
    if settings.max_disk_gb is None:
        return MAX_CONTRIBUTIONS_BYTES
    shard = max_shard_bytes(plan, shards, settings.path)
    needed = needs.disk_bytes(plan, needs.grid_of(plan), shard)
    others = sum(needed.values()) - needed["contributions"]
    return min(MAX_CONTRIBUTIONS_BYTES, int(settings.max_disk_gb * 1e9) - others)


def _machine_checks(
    settings: PeerSettings,
    system: m.System,
    plan: RunPlan | None,
    shards: ShardIndex | None,
    programs_bytes: int = c.PROGRAMS_BYTES,
) -> Iterator[c.Check]:
    """Yield what the machine has, beside what the run takes where that is known."""
    disk_needed = limit = None
    here = 0
    if plan is not None:
        grid = needs.grid_of(plan)
        shard = max_shard_bytes(plan, shards, settings.path)
        disk_needed = sum(needs.disk_bytes(plan, grid, shard).values())
        here = m.used_bytes(settings.cache_folder / plan.run_id)
    if settings.max_disk_gb is not None:
        limit = int(settings.max_disk_gb * 1e9)
    yield c.check_disk(m.look_at_disk(settings.cache_folder), disk_needed, here, system, limit)
    import torch

    try:
        gpu, reason = m.look_at_device(settings.device)
    except ConfigurationError as error:
        yield c.problem("device", str(error), "give another --device")
        return
    yield from _limits_of_the_gpu(settings)
    if gpu is not None and settings.vram_gb is not None:
        most = int(settings.vram_gb * 2**30)
        gpu = replace(gpu, free_bytes=min(gpu.free_bytes, most))
    maker, built_for = m.look_for_gpu_hardware(), m.torch_is_built_for()
    yield c.check_gpu(gpu, settings.device, reason, torch.__version__, maker, built_for)
    if gpu is not None and gpu.missing is not None:
        yield c.check_compiler(gpu, settings.compile_model)
    if plan is None:
        return
    need = memory_need(plan, settings, gpu, programs_bytes)
    if gpu is not None:
        yield c.check_device_memory(need, gpu, settings.micro_batch_size)
    yield c.check_main_memory(need, m.look_at_memory(), gpu, settings.micro_batch_size, system)


def _limits_of_the_gpu(settings: PeerSettings) -> Iterator[c.Check]:
    """Yield that a flag limits a GPU which is not here, or does not say what it needs."""
    device, _ = choose_device(settings.device)
    try:
        limit_memory(device, settings.vram_gb)
        if settings.max_gpu_temp is not None:
            thermometer_of(device)
    except ConfigurationError as error:
        yield c.problem("flags", str(error), "leave the flag out")


def memory_need(
    plan: RunPlan,
    settings: PeerSettings,
    gpu: m.Gpu | None,
    programs_bytes: int = c.PROGRAMS_BYTES,
) -> c.MemoryNeed:
    """Return what training a path takes with these settings, on the GPU or on the CPU."""
    grid = needs.grid_of(plan)
    count = parameter_counts(grid)["path"]
    in_16_bits = gpu is not None and gpu.number_format != "fp32"
    on_device = needs.device_bytes(plan, count, settings.optimizer, in_16_bits=in_16_bits)
    one_pass = on_device.pop(needs.ONE_PASS)
    main = needs.main_memory_bytes(plan, grid, count)
    main_bytes = sum(main.values()) + programs_bytes
    return c.MemoryNeed(
        path_parameters=count,
        fixed_bytes=sum(on_device.values()),
        pass_bytes=one_pass,
        least_pass_bytes=least_pass_bytes(plan.model, in_16_bits=in_16_bits),
        main_bytes=main_bytes,
        batch=plan.inner.batch_sequences,
    )


def max_shard_bytes(plan: RunPlan, shards: ShardIndex | None, path: int | None) -> int:
    """Return the size of the token files of a path, or of the largest; 0 if it is not known."""
    if shards is None:
        return 0
    from dipaco.peer.exchange.fetching import shard_bytes

    files = shard_bytes(shards, plan.model)
    wanted = [shard for shard in shards.paths if path is None or shard.path == path]
    return max(
        (files[shard.train_sha256] + files[shard.validation_sha256] for shard in wanted), default=0
    )
