"""Settings of Sphinx for the site that `make docs` builds. `build.py` in this folder prepares the pages."""

import re
import textwrap

from difftransformer import __version__

project = "difftransformer"
version = release = __version__
copyright = "the difftransformer authors"
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
suppress_warnings = ["myst.strikethrough"]
smartquotes = False
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]  # of pictures: their form for light and for dark pages

# Docstrings write code in single backticks.
default_role = "code"
autodoc_inherit_docstrings = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

nb_execution_mode = "off"  # build.py runs them
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars

html_theme = "furo"
html_title = f"difftransformer {__version__}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0a5a94",
        "color-brand-content": "#0a5a94",
        "color-brand-visited": "#6b3fa0",
        "color-foreground-muted": "#5a5f66",
    },
    "dark_css_variables": {
        "color-brand-primary": "#6cb8ea",
        "color-brand-content": "#6cb8ea",
        "color-brand-visited": "#c3a3f0",
        "color-foreground-muted": "#a8adb3",
    },
}


def keep_equations(app, what, name, thing, options, lines):
    """Show a paragraph of equations as it stands in the docstring: its first line is `name = ...`."""
    text = "\n".join(lines)
    for paragraph in text.split("\n\n"):
        if "\n" in paragraph and re.match(r"[\w()., ]{1,40} = ", paragraph):
            text = text.replace(paragraph, "::\n\n" + textwrap.indent(paragraph, "    "))
    lines[:] = text.split("\n")


def setup(app):
    app.connect("autodoc-process-docstring", keep_equations, priority=900)
