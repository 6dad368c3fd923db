"""The kernels under sanitizers and on emulated processors: `tests/sanitize*.cpp`, built and run.

The driver solves random problems in buffers of exactly their size and compares the results with plain loops.
"""

import functools
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from regard.mechanism import fused

ROOT = Path(__file__).parents[2]
KERNELS, DRIVERS = ROOT / "kernels", sorted((ROOT / "tests").glob("sanitize*.cpp"))
CMAKE = (KERNELS / "CMakeLists.txt").read_text()
OPTIONS = ["-std=c++17", "-g", "-Wno-psabi"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
X86 = ("amx", "emulated_amx", "avx512bf16", "avx512", "avx2", "generic")
ISAS = X86 if platform.machine() in ("x86_64", "AMD64") else ("neon",)
COMPILER = shutil.which("c++")
CROSS, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
Drivers = Callable[[str, str], list[Path]]

pytestmark = pytest.mark.slow


def flags(isa: str) -> list[str]:
    """Return the compiler flags of the build that select instructions and rounding."""
    own = re.search(rf"set\(FLAGS_{isa} ([^)]*)\)", CMAKE)
    common = re.search(r"target_compile_options\(kernels_([^)]*)\)", CMAKE)
    assert common is not None
    return [*(own[1].split() if own else []), *re.findall(r"\s(-f[a-z-]+\S*)", common[1])]


def run(*command: str | Path, timeout: float = 1200) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=timeout)
    done.stdout += done.stderr
    return done


def compile_to(folder: Path, compiler: str, isa: str, source: Path, *options: str | Path) -> Path:
    target = folder / f"{isa}-{source.stem}.o"
    done = run(compiler, *OPTIONS, *options, f"-DISA={isa}", "-c", source, "-o", target)
    assert done.returncode == 0, done.stdout[:5000]
    return target


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Drivers:
    """Compile the driver once per instruction set: the only kernel header it includes is abi.h."""
    folder = tmp_path_factory.mktemp("drivers")
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-I", KERNELS]

    @functools.cache
    def compiled_drivers(compiler: str, isa: str) -> list[Path]:
        return [compile_to(folder, compiler, isa, driver, *options) for driver in DRIVERS]

    return compiled_drivers


def compiled(
    compiler: str,
    folder: Path,
    kernels: Path,
    isa: str,
    sanitizers: list[str],
    drivers: Drivers,
    *more: str,
) -> Path:
    """Link the driver with the kernels for one instruction set; only the kernels are sanitized (faster)."""
    # the driver can make allocations fail
    watched = ["-O1", *flags(isa), *sanitizers, "-Dposix_memalign=allocate", "-I", kernels]
    sources = [kernels / f"{name}.cpp" for name in ("kernels", "instantiate_backward", "search")]
    program = folder / f"{isa}-check"
    objects = [compile_to(folder, compiler, isa, source, *watched) for source in sources]
    done = run(compiler, *sanitizers, *more, "-pthread", *objects, *drivers(compiler, isa), "-o", program)
    assert done.returncode == 0, done.stdout[:5000]
    return program


@pytest.fixture(scope="module")
def sanitizers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("empty")
    (folder / "empty.cpp").write_text("int main() {}")
    done = run(COMPILER, *SANITIZE, folder / "empty.cpp", "-o", folder / "empty")
    if done.returncode or run(folder / "empty").returncode:
        pytest.skip("the compiler has no sanitizers")
    return SANITIZE


@pytest.fixture(scope="module", params=ISAS)
def program(
    request: pytest.FixtureRequest,
    sanitizers: list[str],
    drivers: Drivers,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    available = fused.KERNELS.available() if fused.KERNELS is not None else ISAS[-1:]
    needed = "avx512" if request.param == "emulated_amx" else request.param
    if needed not in available:
        pytest.skip(f"this machine cannot run {request.param}")
    assert COMPILER is not None
    folder = tmp_path_factory.mktemp(request.param)
    return compiled(COMPILER, folder, KERNELS, request.param, sanitizers, drivers)


def test_random_problems_under_sanitizers(program):
    done = run(program, "300")
    assert done.returncode == 0, done.stdout[-5000:]
    assert "0 of 300 rounds failed" in done.stdout


def test_nonfinite_values_are_detected(program):
    done = run(program, "800", "poison")
    assert done.returncode == 0, done.stdout[-5000:]
    assert "0 of 800 rounds failed" in done.stdout


def test_failed_allocations_raise_without_leaks(program):
    done = run(program, "60", "exhaust")
    assert done.returncode == 0, done.stdout[-5000:]
    assert "0 of 60 rounds failed" in done.stdout
    refused = re.search(r"(\d+) allocations refused", done.stdout)
    assert refused is not None
    assert int(refused[1]) > 60


@pytest.mark.parametrize(
    ("file", "right", "wrong", "seen"),
    [
        ("pack.h", "!(whole && width % W)", "true", "heap-buffer-overflow"),
        ("vector.h", "6.9314718e-1f", "6.9304718e-1f", "rounds failed"),
        ("dropout.h", "0x846CA68Bu", "0x846CA68Du", "rounds failed"),
        ("linear.h", "columns == COLUMNS ? out", "true ? out", "heap-buffer-overflow"),
    ],
    ids=["reading too far", "a wrong power", "other keys are dropped", "writing too far"],
)
def test_a_mistake_is_detected(file, right, wrong, seen, sanitizers, drivers, tmp_path):
    """The sanitizers detect memory errors; the driver detects wrong numbers without them."""
    shutil.copytree(KERNELS, tmp_path / "kernels")
    text = (tmp_path / "kernels" / file).read_text()
    assert right in text, f"kernels/{file} has changed: make the mistake elsewhere"
    (tmp_path / "kernels" / file).write_text(text.replace(right, wrong))
    assert COMPILER is not None
    used = sanitizers if "overflow" in seen else []
    done = run(compiled(COMPILER, tmp_path, tmp_path / "kernels", ISAS[-1], used, drivers), "200")
    assert done.returncode != 0
    assert seen in done.stdout


@pytest.mark.skipif("neon" in ISAS, reason="this machine has such a processor")
@pytest.mark.skipif(CROSS is None or QEMU is None, reason="needs g++-aarch64-linux-gnu and qemu-user")
def test_random_problems_on_arm(drivers, tmp_path):
    assert CROSS is not None
    assert QEMU is not None
    program = compiled(CROSS, tmp_path, KERNELS, "neon", [], drivers, "-static")
    for rounds, mode in (("100", []), ("300", ["poison"])):
        done = run(QEMU, program, rounds, *mode)
        assert done.returncode == 0, done.stdout[-5000:]
        assert f"0 of {rounds} rounds failed" in done.stdout
