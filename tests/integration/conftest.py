"""The mesh that most integration tests share, and the lab in which each of them works."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.conftest import CALL_FAILED
from tests.support.mesh import Lab, Mesh
from tests.support.toy import EOS, EOT, ToyModel

#: Prints roles, and the names and arguments of tool calls.
ROLES_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "[{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}]"
    "{% endfor %}{% endif %}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS_TEMPLATE = "{{ raise_exception('roles must take turns') }}"
PARTS_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}({{ p.type }}:{{ p.text }}){% endfor %}{% endif %}{% endfor %}"
)
#: A special token after each message, as most models have it.
MARKS_TEMPLATE = "{% for m in messages %}{{ m.content }}<eot>{% endfor %}"
#: Shows its tools, and how it calls them, as Hermes and Qwen do.
TOOLS_TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }};{% endfor %}</tools>call by <tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
)

HANGUL = {300: b"\xec\x82\xbc\xea\xb2", 301: b"\xb9\xec\x82\xb4"}
#: One id whose text is a hundred bytes.
WIDE = {1000: b"w" * 100}

MODELS = (
    ToyModel("toy", pieces=HANGUL),
    ToyModel("toy-long", context_tokens=16_000_000, pieces=WIDE),
    ToyModel("toy-two-ends", eos_ids=(EOS, EOT)),
    ToyModel("toy-roles", context_tokens=512, template=ROLES_TEMPLATE),
    ToyModel("toy-turns", template=TURNS_TEMPLATE),
    ToyModel("toy-parts", template=PARTS_TEMPLATE),
    ToyModel("toy-sampling", sampling={"temperature": 0.25, "top_k": 7}),
    ToyModel("toy-marks", context_tokens=16384, template=MARKS_TEMPLATE),
    ToyModel("toy-tools", context_tokens=512, template=TOOLS_TEMPLATE),
)


@pytest.fixture(scope="session")
def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """The default configuration; its processes live as long as the run."""
    mesh = Mesh(tmp_path_factory.mktemp("mesh"), MODELS).start()
    yield mesh
    mesh.stop()


@pytest.fixture
def mesh(shared_mesh: Mesh) -> Mesh:
    """The mesh of this test; a module with a need of its own has its own."""
    return shared_mesh


@pytest.fixture
async def lab(mesh: Mesh, request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    """A test's scripted workers and client; afterwards nothing may be left of any request on any service."""
    lab = Lab(mesh)
    yield lab
    await lab.close(check=not request.node.stash.get(CALL_FAILED, False))
