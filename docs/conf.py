"""How the site is built: `make docs`. Nothing is loaded from the network, neither here nor by the pages."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version as installed

import typer
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from driveprune import methods, recipes
from driveprune.cli import app as command

project = "driveprune"
author = "the driveprune developers"
project_copyright = "the driveprune developers, Apache-2.0"
version = release = installed("driveprune")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

default_role = "code"
autodoc_member_order = "bysource"
autodoc_type_aliases = {name: name for name in ("Loss", "Plan", "Scores", "methods.Method", "Budget", "Progress")}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Knobs", "params_style")]
python_maximum_signature_line_length = 90

html_theme = "furo"
html_title = "driveprune"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"


class Listing(SphinxDirective):
    """Something of the package, written as Markdown when the site is built, so that it is never out of date."""

    def run(self) -> list[nodes.Node]:
        """What the lines of Markdown become."""
        section = nodes.Element()
        lines = StringList(list(self.lines(" ".join(self.arguments))), source=self.name)
        self.state.nested_parse(lines, 0, section)
        return list(section.children)

    def lines(self, about: str) -> Iterator[str]:
        """The Markdown."""
        raise NotImplementedError


class Options(Listing):
    """The arguments and options of a command: `{options} sweep`."""

    required_arguments = 1
    final_argument_whitespace = True

    def lines(self, about: str) -> Iterator[str]:
        """A list of names, what they do and their defaults."""
        found = typer.main.get_command(command).commands[about]
        for each in found.params:
            if each.name != "help":
                names = each.opts if each.opts[0][0] == "-" else [each.metavar or each.name.upper()]
                default = each.default not in (None, False, "") and each.opts[0][0] == "-"
                said = f" (default: `{each.default}`)" if default else ""
                yield from (", ".join(f"`{name}`" for name in (*names, *each.secondary_opts)), "")
                yield from (f": {each.help or each.name}{said}", "")


class Recipes(Listing):
    """The recipes of a set: `{recipes} paper`."""

    required_arguments = 1

    def lines(self, about: str) -> Iterator[str]:
        """A table of names and what they are."""
        yield from ("| recipe | what it is |", "|---|---|")
        for name in recipes.names():
            if name.startswith(f"{about}-"):
                yield f"| `{name}` | {recipes.describe(name)} |"


class Methods(Listing):
    """All methods, from their docstrings."""

    def lines(self, about: str) -> Iterator[str]:
        """A heading for each, its score and its plan."""
        for name in methods.names():
            yield from (f"**{name}**", "", "```{eval-rst}", f".. automodule:: driveprune.methods.{name}", "")
            yield from (f".. autofunction:: driveprune.methods.{name}.{each}" for each in ("score", "plan"))
            yield from ("```", "")


def _keep_bars(_: Sphinx, __: str, ___: str, ____: object, _____: object, lines: list[str]) -> None:
    """In a docstring |x| is an absolute value."""
    lines[:] = [
        "`".join(part if n % 2 else part.replace("|", r"\|") for n, part in enumerate(line.split("`")))
        for line in lines
    ]


def setup(app: Sphinx) -> None:
    """Add the directives, and what is done to docstrings."""
    app.connect("autodoc-process-docstring", _keep_bars)
    for name, directive in (("options", Options), ("recipes", Recipes), ("methods", Methods)):
        app.add_directive(name, directive)
