"""The interface, as OpenAPI 3.1: for generators of clients, and for people with a tool."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from elastic_ft.core.sharing.asks import ENDED, LIVE
from elastic_ft.service.listing import LIMIT_MAX

JsonSchema = dict[str, Any]


def _fields(required: tuple[str, ...] = (), **properties: Any) -> JsonSchema:
    found: JsonSchema = {"type": "object", "properties": properties, "additionalProperties": False}
    return found | ({"required": list(required)} if required else {})


def _or_null(kind: str) -> JsonSchema:
    return {"type": [kind, "null"]}


TEXT, WHOLE, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
STATES = [*LIVE, *ENDED]
JOB_PROPERTIES: JsonSchema = {
    "id": TEXT,
    "name": TEXT,
    "queue": TEXT,
    "priority": WHOLE,
    "state": {"enum": STATES},
    "by": TEXT,
    "submitted_at_s": NUMBER,
    "began_at_s": _or_null("number"),
    "ended_at_s": _or_null("number"),
    "workers": _fields(now=WHOLE, min=WHOLE, max=WHOLE, target=WHOLE),
    "step": WHOLE,
    "steps": _or_null("integer"),
    "rate": _or_null("number"),
    "tokens_per_s": _or_null("number"),
    "loss": _or_null("number"),
    "eta_s": _or_null("number"),
    "why": TEXT,
    "reason": TEXT,
}
WHOLE_JOB_PROPERTIES: JsonSchema = JOB_PROPERTIES | {
    "run_folder": TEXT,
    "generation": WHOLE,
    "layout": _or_null("string"),
    "goodput": _or_null("number"),
    "members": {"type": "array", "items": {"type": "object"}},
    "checkpoint": _or_null("object"),
    "decisions": {"type": "array", "items": _fields(at_s=NUMBER, what=TEXT, why=TEXT)},
    "world": {"type": "array", "items": {"type": "object"}},
    "job": {"type": "object"},
}
SUBMISSION = _fields(
    ("job",),
    job={"oneOf": [{"type": "object"}, TEXT], "description": "A job file: its values, or YAML."},
    priority=WHOLE,
    queue=TEXT,
    name=TEXT,
    request={**TEXT, "maxLength": 100, "description": "The same again is the same job."},
)
ID = {"name": "id", "in": "path", "required": True, "schema": TEXT}
ALL = {"name": "all", "in": "query", "schema": {"enum": ["0", "1"]}}
STATE = {
    "name": "state",
    "in": "query",
    "description": "Of these states alone, whatever `all` says.",
    "style": "form",
    "explode": False,
    "schema": {"type": "array", "items": {"enum": STATES}},
}
LIMIT = {
    "name": "limit",
    "in": "query",
    "description": "So many jobs at most; `more` says whether there are more.",
    "schema": {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX},
}
LATER = {
    "name": "after",
    "in": "query",
    "description": "A job's id: the first of those that were submitted after it.",
    "schema": TEXT,
}
EARLIER = {
    "name": "before",
    "in": "query",
    "description": "A job's id: the last of those submitted before it; empty: of all.",
    "schema": TEXT,
}
FOLLOW = {"name": "follow", "in": "query", "schema": {"enum": ["0", "1"]}}
AFTER = {"name": "after", "in": "query", "schema": WHOLE}
LAST = {"name": "Last-Event-ID", "in": "header", "schema": WHOLE}
IN_DOUBT = {"type": "boolean", "description": "It may be done later: the same request tells."}
REFUSAL = _fields(("error",), error=TEXT, in_doubt=IN_DOUBT)
ERROR = {
    "description": "What is refused, in one line.",
    "content": {"application/json": {"schema": REFUSAL}},
}


def _json(schema: JsonSchema) -> JsonSchema:
    return {"content": {"application/json": {"schema": schema}}}


def _operation(
    summary: str,
    answer: JsonSchema,
    *parameters: JsonSchema,
    body: JsonSchema | None = None,
    code: str = "200",
) -> JsonSchema:
    found: JsonSchema = {
        "summary": summary,
        "responses": {code: {"description": summary} | answer, "default": ERROR},
    }
    if parameters:
        found["parameters"] = list(parameters)
    if body is not None:
        found["requestBody"] = _json(body)
    return found


def _stream(summary: str) -> JsonSchema:
    answer = {"content": {"text/event-stream": {}, "application/json": {}}}
    return _operation(summary, answer, ID, FOLLOW, AFTER, LAST)


def _ref(name: str) -> JsonSchema:
    return {"$ref": f"#/components/schemas/{name}"}


def document() -> JsonSchema:
    """Of every path under /api/v1, as JSON."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "elastic_ft service", "version": version("elastic-ft")},
        "servers": [{"url": "/api/v1"}],
        "security": [{"token": []}, {}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "Job": _fields(tuple(JOB_PROPERTIES), **JOB_PROPERTIES),
                "WholeJob": _fields(tuple(WHOLE_JOB_PROPERTIES), **WHOLE_JOB_PROPERTIES),
            },
        },
    }


def _paths() -> JsonSchema:
    whole = _json(_ref("WholeJob"))
    jobs = _json(
        _fields(("jobs",), jobs={"type": "array", "items": _ref("Job")}, more={"type": "boolean"})
    )
    submitted = _json(_fields(id=TEXT, page=TEXT))
    anything = _json({"type": "object"})
    number = {"type": "integer", "minimum": 1}
    return {
        "/service": {"get": _operation("Who the service is, its nodes and queues.", anything)},
        "/service/stop": {
            "post": _operation("Ends it.", anything, body=_fields(jobs={"enum": ["keep", "stop"]}))
        },
        "/login": {"post": _operation("Sets a cookie for streams.", anything)},
        "/openapi.json": {"get": _operation("This document.", anything)},
        "/jobs": {
            "get": _operation(
                "Jobs, in the order of their submission.", jobs, ALL, STATE, LIMIT, LATER, EARLIER
            ),
            "post": _operation("Submits a job.", submitted, body=SUBMISSION, code="201"),
        },
        "/jobs/{id}": {"get": _operation("How a job stands.", whole, ID)},
        "/jobs/{id}/events": {"get": _stream("The journal of its run.")},
        "/jobs/{id}/steps": {"get": _stream("Its committed steps.")},
        "/jobs/{id}/view": {"get": _operation("What a picture of its run shows.", anything, ID)},
        "/jobs/{id}/logs": {"get": _stream("What its processes print.")},
        "/jobs/{id}/stop": {
            "post": _operation("Stops it.", whole, ID, body=_fields(now={"type": "boolean"}))
        },
        "/jobs/{id}/resize": {
            "post": _operation(
                "No more workers than that.", whole, ID, body=_fields(("workers",), workers=number)
            )
        },
        "/jobs/{id}/priority": {
            "post": _operation(
                "Another priority.", whole, ID, body=_fields(("priority",), priority=WHOLE)
            )
        },
    }
