"""Writes what the reference function computes, for ``tests/tests/parity.rs`` to compare with.

The reference is one Python file that is not part of this repository. To write all of ``tests/parity/data`` anew::

    pip install torch==2.13.0 safetensors numpy
    python tests/parity/generate.py <path to checkpoint_fsdp_forward.py>

Each configuration becomes one file of its name. In it are

* ``given.*``: ``variable.*`` (parameters and buffers), ``input.*``, ``weight.*`` (of the outputs' squares, whose sum is
  the loss), ``old.*`` (gradients from before) and ``seed`` (of the default generator, where blocks draw);
* ``reference.*``: what the reference makes of that, ``output.*``, ``requires_grad.*`` (of the outputs), ``loss`` and
  ``grad.*``, which is absent where no gradient arrived;
* ``plain.*``, for the differences: what plain autograd makes of it, likewise.

Running it twice gives the same bytes.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from safetensors.torch import save_file

import differences
import inputs
import layers
import modes
import rollouts
from run import SEED, Run

DATA = Path(__file__).parent / "data"
PARITY = rollouts.CONFIGURATIONS + modes.CONFIGURATIONS + layers.CONFIGURATIONS + inputs.CONFIGURATIONS


def load_reference(path):
    """The reference function from its file."""
    spec = importlib.util.spec_from_file_location("reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.checkpoint_fsdp_forward


def carried_out(configuration, reference=None):
    """The run of a configuration, with its results."""
    run = Run(reference)
    configuration(run)
    run.finish()
    return run


def write(name, **groups):
    """Writes one file with groups of tensors."""
    tensors = {
        f"{group}.{name}": tensor.detach().contiguous()
        for group, members in groups.items()
        for name, tensor in members.items()
    }
    header = {"made by": f"torch {torch.__version__}, one thread, seed {SEED}"}
    save_file(tensors, DATA / f"{name}.safetensors", header)


def main():
    """Runs all configurations and writes their files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path, help="the file checkpoint_fsdp_forward.py")
    reference = load_reference(parser.parse_args().reference)
    torch.set_num_threads(1)
    DATA.mkdir(exist_ok=True)
    for old in DATA.glob("*.safetensors"):
        old.unlink()
    for configuration in PARITY:
        run = carried_out(configuration, reference)
        for parameter, total in run.accumulated.items():
            assert torch.equal(total, parameter.grad), "both hold the sum over all blocks"
        write(configuration.__name__, given=run.given, reference=run.results)
    for configuration in differences.CONFIGURATIONS:
        run, plain = carried_out(configuration, reference), carried_out(configuration)
        write(configuration.__name__, given=run.given, reference=run.results, plain=plain.results)


if __name__ == "__main__":
    main()
