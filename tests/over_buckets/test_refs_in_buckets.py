"""Branches, tags and pins, in a bucket."""

import pytest

from tests.over_buckets.again import again

pytestmark = pytest.mark.usefixtures("in_buckets")

globals().update(again("tests.ops.refs.test_refs_verbs", lambda name: "_file" not in name))


@pytest.fixture(params=[False, True], ids=["etags", "generations"])
def generations(request: pytest.FixtureRequest) -> object:
    return request.param
