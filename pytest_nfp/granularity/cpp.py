"""A small evaluator for granularity rules in C++, over the syntax tree of tree-sitter.

It knows what the rules use: if and else, return, local constants, comparisons, logic, arithmetic, the conditional
operator, members of a named value, and calls that the caller supplies. Anything else makes the rule unknown.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pytest_nfp.granularity.maps import RuleUnknown

if TYPE_CHECKING:
    from tree_sitter import Node

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


class Reference:
    """`&name` as an argument of a supplied call: the value that the call sets becomes the value of the variable."""

    def __init__(self, names: Mapping[str, Any], name: str) -> None:
        self._names, self._name = names, name

    def set(self, value: Any) -> None:
        """Give the variable a value."""
        assert isinstance(self._names, dict)
        self._names[self._name] = value


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


def call_function(source: str, name: str, arguments: Mapping[str, Any], calls: Mapping[str, Callable[..., Any]]) -> Any:
    """Evaluate the C++ function `name` with values for its parameters. Raises RuleUnknown with the reason."""
    function = _function(source, name)
    body = function.child_by_field_name("body")
    declarator = function.child_by_field_name("declarator")
    assert body is not None and declarator is not None
    parameters = declarator.child_by_field_name("parameters")
    names, missing = dict(arguments), []
    for p in parameters.named_children if parameters is not None else ():
        parameter = p.child_by_field_name("declarator")
        default = p.child_by_field_name("default_value")
        if parameter is None or _text(parameter) in names:
            continue
        if default is None:
            missing.append(_text(parameter))
        else:
            names[_text(parameter)] = _value(default, names, calls)
    if missing:
        raise RuleUnknown(f"{name} has parameters that are not known here: {', '.join(missing)}")
    try:
        _run(body, names, calls)
    except _Return as returned:
        return returned.value
    raise RuleUnknown(f"{name} ends without a return for {dict(arguments)}")


def local_constant(source: str, function: str, constant: str, arguments: Mapping[str, Any]) -> Any:
    """The value of a local constant of a C++ function. Raises RuleUnknown if there is none that can be evaluated."""
    for declaration in _descend(_function(source, function), "init_declarator"):
        declarator = declaration.child_by_field_name("declarator")
        value = declaration.child_by_field_name("value")
        if declarator is not None and value is not None and _text(declarator) == constant:
            return _value(value, dict(arguments), {})
    raise RuleUnknown(f"{function} has no constant {constant}")


def branch_value(source: str, function: str, variable: str, arguments: Mapping[str, Any]) -> Any:
    """The value that an if and else of a C++ function assign to a local variable, by its condition.

    Raises RuleUnknown.
    """
    for choice in _descend(_function(source, function), "if_statement"):
        condition = choice.child_by_field_name("condition")
        branches = [choice.child_by_field_name(name) for name in ("consequence", "alternative")]
        values = [
            next((v for b in _descend(branch, "assignment_expression") if (v := _assigned(b, variable))), None)
            for branch in branches
            if branch is not None
        ]
        if condition is not None and len(values) == 2 and all(values):
            value = values[0] if _value(condition, dict(arguments), {}) else values[1]
            assert value is not None
            return _value(value, dict(arguments), {})
    raise RuleUnknown(f"{function} has no branch that sets {variable}")


def _assigned(assignment: Node, variable: str) -> Node | None:
    left = assignment.child_by_field_name("left")
    return assignment.child_by_field_name("right") if left is not None and _text(left) == variable else None


@lru_cache(maxsize=64)
def _function(source: str, name: str) -> Node:
    try:
        import tree_sitter_cpp
        from tree_sitter import Language, Parser
    except ImportError:
        raise RuleUnknown(
            "reading a C++ rule needs the extra 'artifacts': pip install 'pytest-nfp[artifacts]'"
        ) from None
    tree = Parser(Language(tree_sitter_cpp.language())).parse(source.encode())
    for node in _descend(tree.root_node, "function_definition"):
        for declarator in _descend(node, "function_declarator"):
            declared = declarator.child_by_field_name("declarator")
            if declared is not None and _text(declared) == name:
                return node
    raise RuleUnknown(f"the source has no function {name}")


@lru_cache(maxsize=4096)
def _descend(node: Node, kind: str) -> list[Node]:
    matches, queue = [], [node]
    while queue:
        n = queue.pop(0)
        if n.type == kind:
            matches.append(n)
        queue[:0] = n.children
    return matches


def _text(node: Node) -> str:
    return (node.text or b"").decode()


def _run(node: Node, names: dict[str, Any], calls: Mapping[str, Callable[..., Any]]) -> None:
    match node.type:
        case "compound_statement" | "else_clause":
            for child in node.named_children:
                _run(child, names, calls)
        case "comment" | "preproc_def" | ";":
            return
        case "if_statement":
            condition = node.child_by_field_name("condition")
            branch = node.child_by_field_name("consequence")
            assert condition is not None and branch is not None
            if not _value(condition, names, calls):
                branch = node.child_by_field_name("alternative")
            if branch is not None:
                _run(branch, names, calls)
        case "return_statement":
            raise _Return(_value(node.named_children[0], names, calls))
        case "declaration":
            for child in node.children_by_field_name("declarator"):
                declarator, value = child.child_by_field_name("declarator"), child.child_by_field_name("value")
                if declarator is None or value is None:
                    continue  # Declared without a value: a rule that reads it before it is set is unknown.
                names[_text(declarator)] = _value(value, names, calls)
        case "expression_statement" if node.named_children and node.named_children[0].type == "call_expression":
            _value(node.named_children[0], names, calls)
        case _:
            raise RuleUnknown(f"line {node.start_point[0] + 1}: {node.type} is not evaluated: {_text(node)[:60]}")


def _value(node: Node, names: Mapping[str, Any], calls: Mapping[str, Callable[..., Any]]) -> Any:
    def child(field: str) -> Any:
        part = node.child_by_field_name(field)
        assert part is not None
        return _value(part, names, calls)

    match node.type:
        case "number_literal":
            return int(_text(node).rstrip("uUlL"), 0)
        case "true" | "false":
            return node.type == "true"
        case "identifier" if _text(node) in names:
            return names[_text(node)]
        case "cast_expression":
            return child("value")
        case "pointer_expression" if _text(node).startswith("&"):
            target = node.child_by_field_name("argument")
            assert target is not None
            return Reference(names, _text(target))
        case "initializer_list":
            return [_value(v, names, calls) for v in node.named_children if v.type != "comment"]
        case "parenthesized_expression" | "condition_clause":
            return _value(node.named_children[-1], names, calls)
        case "conditional_expression":
            return child("consequence") if child("condition") else child("alternative")
        case "unary_expression":
            value = child("argument")
            sign = _text(node)[0]
            if sign in "!-":
                return not value if sign == "!" else -value
        case "field_expression":
            field = node.child_by_field_name("field")
            assert field is not None
            return child("argument")[_text(field)]
        case "call_expression":
            function = node.child_by_field_name("function")
            arguments = node.child_by_field_name("arguments")
            assert function is not None and arguments is not None
            if _text(function) in calls:
                return calls[_text(function)](*(_value(a, names, calls) for a in arguments.named_children))
        case "binary_expression":
            sign_node = node.child_by_field_name("operator")
            assert sign_node is not None
            sign = _text(sign_node)
            if sign == "&&":
                return child("left") and child("right")
            if sign == "||":
                return child("left") or child("right")
            if sign in _OPERATORS:
                return _OPERATORS[sign](child("left"), child("right"))
    raise RuleUnknown(f"line {node.start_point[0] + 1}: {node.type} is not evaluated: {_text(node)[:60]}")
