"""Fixtures of the tests of startup/."""

from tests.serve.conftest import one_renderer as one_renderer
