"""Importing torch without its Python kernels for meta tensors."""

import subprocess
import sys


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_meta_kernels_are_imported_on_demand():
    out = run("""
from regard._util.torch_import import defer_meta_kernels
defer_meta_kernels()
import sys, torch
print("torch._decomp" in sys.modules, torch.ones(2, 3).T @ torch.ones(2))
from torch._meta_registrations import register_meta
print("torch._decomp" in sys.modules, sys.modules["torch._meta_registrations"].register_meta is register_meta)
x = torch.empty(4, 5, device="meta")
print(torch.linalg.inv(x.T @ x).shape)
""")
    assert out == ("False tensor([2., 2., 2.])\nTrue True\ntorch.Size([5, 5])\n")


def test_nothing_is_deferred_once_torch_is_imported():
    out = run("""
import sys, torch
from regard._util.torch_import import defer_meta_kernels
before = sys.modules["torch._meta_registrations"]
defer_meta_kernels()
print(sys.modules["torch._meta_registrations"] is before)
""")
    assert out == "True\n"
