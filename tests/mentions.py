"""What a Python file mentions of other modules, under full names, whatever it calls them itself."""

import ast


def full_names(tree):
    """Return {a name in the file: the full names that it may stand for}, wherever it is set.

    It follows imports, assignments (load = torch.load) and classes that are made from others.
    """
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                names.setdefault(alias.asname or root, set()).add(
                    alias.name if alias.asname else root
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.setdefault(alias.asname or alias.name, set()).add(full)
    before = None
    while before != str(names):  # one alias may lead to the next
        before = str(names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                targets, values = node.targets, [node.value]
            elif isinstance(node, ast.NamedExpr):
                targets, values = [node.target], [node.value]
            elif isinstance(node, ast.ClassDef):
                targets, values = [ast.Name(node.name)], node.bases
            else:
                continue
            for name in (x.id for x in targets if isinstance(x, ast.Name)):
                for value in values:
                    known = {x for x in resolve(value, names) if x != name}
                    if isinstance(root_of(value), ast.Name) and root_of(value).id in names:
                        names.setdefault(name, set()).update(known)
    return names


def root_of(node):
    """Return the node at the left end of a.b.c."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def resolve(node, names):
    """Return the full names that an expression such as a.b.c may stand for."""
    if isinstance(node, ast.Name):
        return names.get(node.id, {node.id})
    if isinstance(node, ast.Attribute):
        return {f"{base}.{node.attr}" for base in resolve(node.value, names)}
    return {"?"}


def mentions(text):
    """Yield (full name, call) for whatever a Python text mentions by name.

    The call is that of the mentioned function, or the one that gets it as an argument, as in
    attempt(torch.load, path); None where there is none. A name that is made from a text counts too:
    getattr(torch, "load").
    """
    tree = ast.parse(text)
    names, parents = full_names(tree), {}
    for node in ast.walk(tree):
        parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
    for node in ast.walk(tree):
        above = parents.get(node)
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield f"{node.module}.*", None
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            given = node.args[1] if len(node.args) > 1 else None  # *names may hold it
            word = given.value if isinstance(given, ast.Constant) else "?"
            for base in resolve(node.args[0], names):
                yield f"{base}.{word}", None
        if not isinstance(node, ast.Name | ast.Attribute) or isinstance(above, ast.Attribute):
            continue
        if isinstance(above, ast.keyword):
            above = parents[above]
        for name in sorted(resolve(node, names)):
            yield name, above if isinstance(above, ast.Call) else None


def keywords(call):
    """Return {name: text} of the keyword arguments of a call; of None, nothing."""
    return {x.arg: ast.unparse(x.value) for x in call.keywords} if call else {}
