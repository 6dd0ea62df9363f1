"""How Sphinx builds the documentation: `make docs`. Its source is the whole checkout, so that pages may link to any file of it."""

import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docs import docstrings, members  # noqa: E402 - found by the line above
from shardnet import testing  # noqa: E402
from shardnet.version import VERSION  # noqa: E402

project = "shardnet"
project_copyright = "the authors of shardnet"
version = release = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["README.md", "benchmarks/README.md", "benchmarks/results/tables.md", "docs/**.md"]
exclude_patterns = [".*", "build", "dist", "runs", "shardnet", "tests"]
nitpicky = True  # a name in a signature that leads nowhere is a warning, and `make docs` takes warnings for errors
# What others document, and no host is asked for where.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!shardnet\.).*"),
    (r"py:.*", r"shardnet\.\S+\.[A-Z]"),  # type variables
]
# Of the inside, though they stand in signatures: a user is given them or leaves them alone, and never makes one.
nitpick_ignore = [
    ("py:class", f"shardnet.{name}")
    for name in (
        "backend.cluster.ClusterBackend",
        "backend.mesh_backend.MeshBackend",
        "collectives.group.Group",
        "collectives.switchboard.Switchboard",
        "credentials.bundle.Credentials",
        "credentials.security.Security",
        "elastic.saves.Saving",
        "fsdp.compressed.codec.Codec",
        "fsdp.communicators.Communicators",
        "fsdp.group.FlatGroup",
        "fsdp.precision.Dtypes",
        "fsdp.resharding.Resharding",
        "pb.stats_pb2.SnapshotReply",
        "performance.recorder.SteppingOptimizer",
        "sharding.layout.ParameterSlice",
        "telemetry.Pass",
        "telemetry.Telemetry",
    )
]

myst_heading_anchors = 4
highlight_language = "text"

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_class_signature = "mixed"
autoclass_content = "both"
autodoc_inherit_docstrings = False  # those of torch are written in torch's own way
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"shardnet {VERSION}"
html_extra_path = ["front"]
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_sphinx = False

for each in testing.__all__:  # which it imports when they are asked for, and Sphinx only looks
    vars(testing)[each] = getattr(testing, each)


def setup(app: Sphinx) -> None:
    members.read_comments(ROOT / "shardnet")
    app.connect("autodoc-process-docstring", docstrings.process)
    app.connect("autodoc-skip-member", members.skip)
