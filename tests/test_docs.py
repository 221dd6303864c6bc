"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax

MODULES = sorted(m.name for m in pkgutil.walk_packages(mpjax.__path__, "mpjax."))
GLOBALS = {"mpjax": mpjax, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "nn": nn, "nnx": nnx}


def examples(name: str) -> list[doctest.DocTest]:
    module = importlib.import_module(name)
    found = doctest.DocTestFinder().find(module, name, globs={**GLOBALS, **vars(module)})
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", ["mpjax", *MODULES])
def test_the_examples_in_the_docstrings_of_a_module_give_what_they_show(name):
    runner = doctest.DocTestRunner(verbose=False)
    output: list[str] = []
    for test in examples(name):
        runner.run(test, out=output.append)
    assert not runner.summarize(verbose=False).failed, "".join(output)


def test_there_are_examples():
    assert sum(len(examples(name)) for name in MODULES) >= 7


@pytest.mark.parametrize("name", ["mpjax", *MODULES])
def test_every_module_says_what_it_is_for(name):
    assert importlib.import_module(name).__doc__
