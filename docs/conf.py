"""How Sphinx builds the documentation: `make docs`."""

from sphinx.util.nodes import make_refnode

import zerojax

project, author, copyright = "zerojax", "the zerojax authors", "the zerojax authors, Apache 2.0"
version = release = zerojax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"zerojax {version}"
html_show_sourcelink = False

default_role = "py:obj"  # `make_plan` in a docstring is a link
nitpicky = True
# What other packages define is named, and not linked: their indexes are on the network, and a build needs none.
nitpick_ignore_regex = [("py:.*", r"(jax|jaxlib|flax|optax|numpy|typing|collections)\..*")]
nitpick_ignore = [
    ("py:obj", "PartitionSpec"),
    ("py:obj", "NamedSharding"),
    ("py:class", "zerojax.scaling.Watch"),  # fields that nobody sets
    ("py:class", "zerojax.step._Returned"),
]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_custom_sections = [("Attributes", "params_style")]  # also several in one entry
myst_heading_anchors = 3


def _no_type_in_words(app, what, name, obj, options, lines):
    """Puts an empty comment first: what stands before a colon in a property's first line, napoleon takes for a type."""
    if what == "property":
        lines[:0] = ["..", ""]


def _found_anywhere(app, env, node, content):
    """`Plan` in a docstring is `zerojax.Plan`, in whichever module it stands."""
    if node.get("reftype") != "obj":
        return None
    domain = env.domains.python_domain
    matches = domain.find_obj(env, None, None, node["reftarget"], None, searchmode=1)
    found = [(name, entry) for name, entry in matches if not entry.aliased]
    if len(found) != 1:
        return None
    name, entry = found[0]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, name)


def setup(app):
    app.connect("autodoc-process-docstring", _no_type_in_words, priority=100)
    app.connect("missing-reference", _found_anywhere)
