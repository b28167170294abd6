"""The TypeScript form of tool declarations, character for character."""

from typing import Any

from kimi_backend.text.tool_declaration import declare_tools


def declare(parameters: dict[str, Any] | None, **function: Any) -> str:
    """The declaration of one function f, without the frame."""
    fields = {"name": "f", **function} | ({"parameters": parameters} if parameters is not None else {})
    text = declare_tools([{"type": "function", "function": fields}])
    assert text is not None
    return text.removeprefix("# Tools\n\n## functions\nnamespace functions {\n").removesuffix("\n}\n")


def properties(**items: Any) -> dict[str, Any]:
    return {"type": "object", "properties": items}


def test_frame() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("one", "two")]
    assert declare_tools(tools) == (
        "# Tools\n\n## functions\nnamespace functions {\ntype one = (_: {}) => any;\ntype two = (_: {}) => any;\n}\n"
    )


def test_required_first_then_by_name() -> None:
    schema = properties(b={"type": "string"}, a={"type": "boolean"}, d={}, c={"type": "integer"})
    schema["required"] = ["d", "c"]
    assert declare(schema) == ("type f = (_: {\n  c: number,\n  d: any,\n  a?: boolean,\n  b?: string\n}) => any;")


def test_comments_constraints_defaults() -> None:
    schema = properties(
        n={"type": "integer", "description": "How many.\n\nAt most ten.", "minimum": 0, "maximum": 10, "default": 3},
        s={"type": "string", "pattern": "^a", "maxLength": 4, "default": "é"},
        t={"type": "boolean", "default": True},
    )
    assert declare(schema, description="Does it.") == (
        "// Does it.\ntype f = (_: {\n"
        "  // How many.\n\n  // At most ten.\n  // maximum: 10, minimum: 0\n  // Default: 3\n  n?: number,\n"
        '  // maxLength: 4, pattern: ^a\n  // Default: "é"\n  s?: string,\n'
        "  // Default: True\n  t?: boolean\n}) => any;"
    )


def test_nested_types() -> None:
    schema = properties(
        list={"type": "array", "items": {"type": "string"}, "minItems": 1},
        listed={"type": "array", "items": {"type": "string", "description": "One."}},
        any_list={"type": "array"},
        choice={"enum": ["a", 1]},
        either={"anyOf": [{"type": "string"}, {"type": "null"}]},
        union={"type": ["integer", "object", "array"]},
        inner={"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False},
        map={"type": "object", "additionalProperties": {"type": "string"}},
        always=True,
    )
    assert declare(schema) == (
        "type f = (_: {\n"
        "  always?: any,\n"
        "  any_list?: Array<any>,\n"
        '  choice?: "a" | 1,\n'
        "  either?: string | null,\n"
        "  inner?: {\n    x?: number,\n    [k: string]: never\n  },\n"
        "  // minItems: 1\n  list?: Array<string>,\n"
        "  listed?: Array<\n    // One.\n    string\n  >,\n"
        "  map?: {\n    [k: string]: string\n  },\n"
        "  union?: number | {} | Array<any>\n"
        "}) => any;"
    )


def test_definitions_and_self_reference() -> None:
    node = {"type": "object", "description": "A node.", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    assert declare({**properties(head={"$ref": "#/$defs/Node"}), "$defs": {"Node": node}}) == (
        "// A node.\ninterface Node {\n  next?: Node\n}\ntype f = (_: {\n  head?: Node\n}) => any;"
    )
    schema = {**properties(child={"$ref": "#"}, x={"type": "string"}), "required": ["x"]}
    assert declare(schema) == (
        "interface parameters {\n  child?: parameters,\n  x: string\n}\ntype f = (_: parameters) => any;"
    )


def test_what_has_no_form_gives_none() -> None:
    for schema in (
        properties(a={"$ref": "http://elsewhere"}),
        properties(a={"$ref": "#/$defs/Absent"}),
        properties(a={"oneOf": []}),
        properties(a=3),
        properties(a={"type": ["nonsense"]}),
    ):
        assert declare_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}]) is None
