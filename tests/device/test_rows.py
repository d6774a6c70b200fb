"""Rows of a running batch on the device, in bfloat16: bit for bit what each gives alone."""

import pytest
from device.models import BUDGET, SMALL
from schedules import check, lone

from kvjax._util.randomness import random_key
from kvjax.models import init

from .test_policies import POLICIES

NAMES = ["full", "snapkv", "treekv", "h2o", "chelsea", "clusterkv", "rkv", "kivi"]


@pytest.fixture(scope="module")
def params():
    return init(SMALL, random_key(0), "bfloat16")


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_row_alone(name, params):
    assert BUDGET
    check(*lone(POLICIES[name], params), range(5))
