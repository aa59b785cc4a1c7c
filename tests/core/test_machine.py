"""Free memory as the kernel's files tell it, and what the machine can do."""

import os
from pathlib import Path

import pytest
import torch

from stack.core import machine
from stack.core.errors import UserError

MB = 1 << 20


def system(root: Path, cgroup: str, **files: str) -> Path:
    """A file system with these files."""
    texts = {"proc/self/cgroup": cgroup, "proc/meminfo": f"MemTotal: 9000 kB\nMemAvailable:    {3 * 1024} kB\n"}
    for name, text in {**texts, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def level(limit: int | str, used: int, cache: int = 0) -> dict[str, str]:
    """The files of one level of cgroup v2, in MB."""
    return {
        "memory.max": limit if limit == "max" else str(limit * MB),
        "memory.current": str(used * MB),
        "memory.stat": f"anon 5\ninactive_file {cache * MB}\nactive_file 7\n",
    }


def under(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


def test_available_memory(tmp_path):
    assert machine._available(system(tmp_path, "")) == 3 * MB
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine._available(tmp_path / "elsewhere") == total


def test_cgroup_v2_counts_every_level_and_gives_the_page_cache_back(tmp_path):
    root = system(
        tmp_path,
        "0::/outer/inner\n",
        **under("sys/fs/cgroup", level("max", 900)),
        **under("sys/fs/cgroup/outer", level(50, 45, cache=2)),
        **under("sys/fs/cgroup/outer/inner", level(100, 40)),
    )
    assert machine._cgroup_rooms(root) == [60 * MB, 7 * MB]


def test_cgroup_v2_without_a_limit_or_over_it(tmp_path):
    assert machine._cgroup_rooms(system(tmp_path / "a", "0::/\n", **under("sys/fs/cgroup", level("max", 9)))) == []
    assert machine._cgroup_rooms(system(tmp_path / "b", "0::/\n", **under("sys/fs/cgroup", level(8, 9)))) == [0]


def test_cgroup_v1_in_a_container(tmp_path):
    """The path is the host's, which a container does not see; its own limit is at the top."""
    root = system(
        tmp_path,
        "5:cpu,cpuacct:/docker/abc\n4:hugetlb,memory:/docker/abc\n0::/docker/abc\n",
        **{
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(64 * MB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(60 * MB),
            "sys/fs/cgroup/memory/memory.stat": f"cache 1\ninactive_file {MB}\ntotal_inactive_file {3 * MB}\n",
        },
    )
    assert machine._cgroup_rooms(root) == [7 * MB]


def test_no_cgroups(tmp_path):
    assert machine._cgroup_rooms(tmp_path) == []


def test_free_memory_of_this_machine():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine.free_memory("cpu") <= total
    assert 0 < machine.peak_memory("cpu") <= total


def test_peak_memory_is_the_kernels_high_water_mark():
    block = torch.ones(8 * MB)  # 32 MB
    del block
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        assert machine.peak_memory("cpu") == pytest.approx(int(fields["VmHWM"].split()[0]) * 1024, rel=0.01)


def test_precision_is_what_was_said_else_what_is_fast():
    for device in ("cpu", "mps"):
        assert machine.choose_precision("bf16", device) == torch.bfloat16
        assert machine.choose_precision("float32", device) == torch.float32
    assert machine.choose_precision("auto", "mps") == torch.float32
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        flags = set(cpuinfo.read_text().split())
        fast = bool(flags & {"avx512_bf16", "amx_tile"})
        assert machine.choose_precision("auto", "cpu") == (torch.bfloat16 if fast else torch.float32)


def test_devices():
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    assert there[machine.choose_device("auto")]
    assert machine.choose_device("auto") != "cpu" or list(there.values()).count(True) == 1
    for device, is_there in there.items():
        if is_there:
            assert machine.choose_device(device) == device
        else:
            with pytest.raises(UserError, match=f"device={device}.*device=auto"):
                machine.choose_device(device)


def test_a_machine_without_a_compiler_is_told_why(monkeypatch):
    def broken(function):
        raise RuntimeError("no C++ compiler\nand a long trace")

    monkeypatch.setattr(torch, "compile", broken)
    assert machine.compiler_works("cpu") == "RuntimeError: no C++ compiler"
    monkeypatch.setattr(torch, "compile", lambda function: function)
    assert machine.compiler_works("cpu") == ""
