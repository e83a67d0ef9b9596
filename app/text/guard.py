"""Puts the sandbox's hooks into a parsed template, where Jinja would do the work without asking anyone."""

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from app.text.budget import TemplateError

_REFUSED = {
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "from",
    nodes.Extends: "extends",
    nodes.FilterBlock: "filter",
}


def guard(tree: nodes.Template) -> nodes.Template:
    """Rewrites `tree` in place.

    Every pass of a loop and every call of a macro first ticks; concatenation, slices, filters and written-out lists
    and dicts go through the hooks of `BoundedEnvironment`.

    Raises:
        TemplateError: a statement that is not available.
    """
    for kind, name in _REFUSED.items():
        found = tree.find(kind)
        if found is not None:
            raise TemplateError(f"line {found.lineno}: {{% {name} %}} is not available in a chat template")
    for block in tree.find_all(nodes.AssignBlock):
        if block.filter is not None:
            raise TemplateError(f"line {block.lineno}: a filter on {{% set %}} is not available in a chat template")
    guarded: nodes.Template = _Guard().visit(tree)
    return guarded


def _hook(name: str, like: nodes.Node, *args: nodes.Expr) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), [nodes.ContextReference(), *args], [], None, None)
    call.set_lineno(like.lineno)
    return call


def _is_constant(node: nodes.Node) -> bool:
    """A literal without variables costs no more than the template's own source."""
    return all(isinstance(child, nodes.Const) for child in node.find_all(nodes.Expr))


class _Guard(NodeTransformer):
    def _repeated(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        """The tick is charged with the constant text of the body, which no other hook sees."""
        chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        tick = nodes.ExprStmt(_hook("tick", node, nodes.Const(chars)))
        tick.set_lineno(node.lineno)
        node.body.insert(0, tick)
        return node

    visit_For = visit_Macro = visit_CallBlock = _repeated

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _hook("written", node, *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        part = node.arg
        if not isinstance(part, nodes.Slice):
            return node
        bounds = [bound or nodes.Const(None) for bound in (part.start, part.stop, part.step)]
        return _hook("cut", node, node.node, *bounds)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        return _hook("charged", node, node)

    def _display(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or _is_constant(node):  # a tuple may also be a target of `for`, `set`
            return node
        return _hook("weighed", node, node)

    visit_List = visit_Tuple = visit_Dict = _display
