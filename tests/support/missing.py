"""Code that makes packages look as if they were not installed, for the beginning of a program in a process of its own."""


def without(*names):
    """The code. An entry of None in sys.modules would be taken for the package by those that look it up there."""
    return (
        "import sys, types\n"
        "def find_spec(name, *_):\n"
        f"    if name.partition('.')[0] in {names}:\n"
        "        raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, types.SimpleNamespace(find_spec=find_spec))\n"
    )
