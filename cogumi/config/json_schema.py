"""The JSON schema of a run's YAML, for editors and agents. `load_config` refuses more: it compares keys, and files exist."""

from collections.abc import Container
from importlib.util import find_spec
from typing import Any, Literal, Optional

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from cogumi.config import binding
from cogumi.config.presets import PRESETS
from cogumi.config.schema import REFUSED_TRAIN_KEYS, TRL_CONFIGS, RunConfig

DIALECT = "http://json-schema.org/draft-07/schema#"  # the newest that YAML language servers read in full


class YamlSchema(GenerateJsonSchema):
    """Allow what YAML 1.1 makes of numbers and switches: it reads `5e-7` as text, and a bare `on` or `off` as a bool."""

    def float_schema(self, schema: Any) -> JsonSchemaValue:
        exponent = r"^[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+$"
        return super().float_schema(schema) | {"type": ["number", "string"], "pattern": exponent}

    def literal_schema(self, schema: Any) -> JsonSchemaValue:
        words = super().literal_schema(schema)
        return {"enum": [*words["enum"], True, False]} if "off" in words.get("enum", ()) else words

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        types, words = inner.pop("type", []), inner.pop("enum", [])
        if not types and not words:
            return super().nullable_schema(schema)
        nullable = {"type": [*([types] if isinstance(types, str) else types), "null"]} if types else {}
        return inner | nullable | ({"enum": [*words, None]} if words else {})


def build_schema() -> dict[str, Any]:
    """Return the schema; without TRL installed, `train:` takes any key."""
    schema = RunConfig.model_json_schema(schema_generator=YamlSchema)
    sections, model = schema["properties"], schema["$defs"]["ModelSection"]["properties"]
    sections["lora"] = describe_section("LoraConfig", binding.FIXED_LORA_KEYS)
    sections["train"] = {"type": ["object", "null"], "description": "TRL's config for cogumi.method."}
    model["quantization_config"] |= describe_section("BitsAndBytesConfig")
    has_environment = {"properties": {"cogumi": {"required": ["environment"]}}}  # which brings its own data
    schema |= {"required": ["model", "cogumi"], "anyOf": [{"required": ["data"]}, has_environment]}
    for method, name in TRL_CONFIGS.items() if find_spec("trl") else ():
        train = describe_section(name, REFUSED_TRAIN_KEYS)
        if method == "gspo":
            train["properties"]["loss_type"] = {"enum": [*sorted({*PRESETS, *binding.losses_in_source()}), None]}
        is_method = {"required": ["method"], "properties": {"method": {"const": method}}}
        condition = {"required": ["cogumi"], "properties": {"cogumi": is_method}}
        schema.setdefault("allOf", []).append({"if": condition, "then": {"properties": {"train": train}}})
    return {"$schema": DIALECT, "title": "cogumi: configuration of a run"} | schema


def describe_section(name: str, refused: Container[str] = ()) -> dict[str, Any]:
    """Return the schema of a section that is bound to a library's config class; null removes a key."""
    defaults = {} if name == "BitsAndBytesConfig" else binding.defaults_in_source(name)
    properties = {}
    for key, hint in binding.hints_in_source(name).items():
        if key not in refused:
            accepted: Any = hint | Literal[False] if key in binding.STRATEGIES else hint  # a bare `no` in YAML 1.1
            schema = TypeAdapter(Optional[accepted]).json_schema(schema_generator=YamlSchema)  # noqa: UP045
            properties[key] = schema | ({"default": defaults[key]} if key in defaults else {})
    with_unsloth = binding.owner_of(name) == "trl" and find_spec("unsloth") is not None  # which adds keys of its own
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": with_unsloth}
