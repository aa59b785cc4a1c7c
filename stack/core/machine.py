"""What this machine is and can do: device, precision, compiler, free memory, peak memory."""

from __future__ import annotations

import functools
import os
import resource
from contextlib import suppress
from pathlib import Path

import torch

from stack.core.errors import UserError

STATUS = Path("/proc/self/status")  # Linux


def choose_device(wanted: str) -> str:
    """``cpu``, ``cuda`` or ``mps``; ``auto`` takes the first of cuda, mps, cpu that is there."""
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return next(name for name, there in have.items() if there)
    if not have[wanted]:
        raise UserError(f"device={wanted}: this machine has none that PyTorch {torch.__version__} can use; device=auto")
    return wanted


def fast_bf16(device: str) -> bool:
    """True where bfloat16 GEMMs are computed by the hardware: CUDA from sm80, CPUs with AVX512-BF16 or AMX."""
    if device == "cuda":
        return torch.cuda.get_device_capability()[0] >= 8
    return device == "cpu" and bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def choose_precision(wanted: str, device: str) -> torch.dtype:
    """The dtype of GEMMs; ``auto`` takes bfloat16 where :func:`fast_bf16` holds."""
    if wanted == "auto":
        wanted = "bf16" if fast_bf16(device) else "float32"
    return torch.bfloat16 if wanted == "bf16" else torch.float32


def compiler_works(device: str) -> str:
    """Compiles and runs one small function; an empty string, or why it cannot be done here."""
    try:
        torch.compile(lambda x: torch.sin(x) * 2)(torch.zeros(8, device=device))
    except Exception as error:  # whatever keeps a machine from compiling must not keep it from training
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return ""


def free_memory(device: str) -> int:
    """Bytes that can still be taken: of the device, or the least of MemAvailable and what the cgroup leaves."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return min([_available(Path("/")), *_cgroup_rooms(Path("/"))])


def _available(root: Path) -> int:
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroup_rooms(system: Path) -> list[int]:
    """What the memory limits of cgroup v2 and v1, all levels up, leave to this process."""
    own = system / "proc/self/cgroup"
    if not own.exists():
        return []
    rooms = []
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used = system / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, used = system / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        for level in (folder := root / path.lstrip("/"), *folder.parents):
            if not level.is_relative_to(root):
                break
            if (level / limit).exists() and (text := (level / limit).read_text().strip()) != "max":
                rooms.append(max(0, int(text) - int((level / used).read_text()) + _reclaimable(level)))
    return rooms


def _reclaimable(level: Path) -> int:
    """Page cache that a cgroup would give back; the kernel counts it as used."""
    stat = level / "memory.stat"
    if not stat.exists():
        return 0
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return int(
        fields.get("total_inactive_file") or fields.get("inactive_file", 0)
    )  # with its children; v2 has one name


def peak_memory(device: str) -> int:
    """Bytes at the highest point so far: of tensors on the device, or resident in this process."""
    if device == "cuda":
        return torch.cuda.memory_stats()["active_bytes.all.peak"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if os.uname().sysname == "Darwin" else 1024)


@functools.cache
def program_memory() -> int:
    """Bytes resident at the first call, which is for the moment before a model is built; libraries' files apart.

    Where Linux allows it the high-water mark starts anew, so that the making of data before does not count.
    """
    with suppress(OSError):  # no Linux, or not allowed: then what came before counts
        Path("/proc/self/clear_refs").write_text("5")
    return _status()["RssAnon"] if STATUS.exists() else 0


def memory_figures(device: str) -> dict[str, float]:
    """What training takes at its highest point, in GB, and what tells how well the allocator does.

    ``peak_gb`` is what a plan speaks about. On a CPU: the resident high-water mark over :func:`program_memory`,
    pages of files apart; ``process_peak_gb`` is all of it. On CUDA: active blocks; with ``reserved_gb``, what the
    allocator holds of the device, and ``retries``, how often it had to give back all of its cache first.
    """
    if device == "cuda":
        stats = torch.cuda.memory_stats()
        return {
            "peak_gb": stats["active_bytes.all.peak"] / 1e9,
            "reserved_gb": stats["reserved_bytes.all.peak"] / 1e9,
            "retries": stats["num_alloc_retries"],
        }
    whole = peak_memory(device) / 1e9
    if not STATUS.exists():
        return {"peak_gb": whole}
    level, now = program_memory(), _status()
    return {"peak_gb": max(0, now["VmHWM"] - now["RssFile"] - level) / 1e9, "process_peak_gb": whole}


def _status() -> dict[str, int]:
    """``VmHWM``, ``RssAnon``, ``RssFile`` … of this process, in bytes."""
    lines = (line.split() for line in STATUS.read_text().splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in lines}
