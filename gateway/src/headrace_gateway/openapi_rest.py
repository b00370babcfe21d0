"""What the OpenAPI document says of the answers of FastAPI's routes: schemas, errors, links."""

from __future__ import annotations

from headrace_gateway.openapi_answers import COUNT, TEXT, Json, list_of, maybe, object_of

_REF = "#/components/schemas/{name}"
_WHEN: Json = maybe(COUNT)


def _page(name: str, **fields: Json) -> Json:
    return object_of(
        {
            **fields,
            "data": list_of({"$ref": _REF.format(name=name)}),
            "first_id": maybe(TEXT),
            "last_id": maybe(TEXT),
            "has_more": {"type": "boolean"},
        }
    )


def _deleted(kind: str) -> Json:
    return object_of({"id": TEXT, "object": {"const": kind}, "deleted": {"const": True}})


_BATCH = object_of(
    {
        "id": TEXT,
        "object": {"const": "batch"},
        "endpoint": TEXT,
        "input_file_id": TEXT,
        "completion_window": {"const": "24h"},
        "status": {
            "enum": [
                "validating", "in_progress", "finalizing", "cancelling",
                "completed", "failed", "expired", "cancelled",
            ]
        },
        "created_at": COUNT,
        "expires_at": COUNT,
        "output_file_id": maybe(TEXT),
        "error_file_id": maybe(TEXT),
        "request_counts": object_of({"total": COUNT, "completed": COUNT, "failed": COUNT}),
        "metadata": maybe({"type": "object"}),
        "usage": maybe(
            object_of(
                {
                    "input_tokens": COUNT,
                    "input_tokens_details": object_of({"cached_tokens": COUNT}),
                    "output_tokens": COUNT,
                    "output_tokens_details": object_of({"reasoning_tokens": COUNT}),
                    "total_tokens": COUNT,
                }
            )
        ),
        **{
            f"{moment}_at": _WHEN
            for moment in (
                "in_progress", "finalizing", "completed", "failed", "expired", "cancelling",
                "cancelled",
            )
        },
    }
)  # fmt: skip
_TIME: Json = {"type": "string", "format": "date-time"}
_MESSAGE_BATCH = object_of(
    {
        "id": TEXT,
        "type": {"const": "message_batch"},
        "processing_status": {"enum": ["in_progress", "canceling", "ended"]},
        "request_counts": object_of(
            dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), COUNT)
        ),
        "created_at": _TIME,
        "expires_at": _TIME,
        **dict.fromkeys(("ended_at", "cancel_initiated_at", "archived_at"), maybe(_TIME)),
        "results_url": maybe(TEXT),
    }
)
_FILE = object_of(
    {
        "id": TEXT,
        "object": {"const": "file"},
        "bytes": COUNT,
        "created_at": COUNT,
        "expires_at": COUNT,
        "filename": TEXT,
        "purpose": {"enum": ["batch", "batch_output"]},
        "status": TEXT,
    }
)
_UPLOAD = object_of(
    {
        "id": TEXT,
        "object": {"const": "upload"},
        "bytes": COUNT,
        "created_at": COUNT,
        "expires_at": COUNT,
        "filename": TEXT,
        "purpose": {"const": "batch"},
        "status": {"enum": ["pending", "completed", "cancelled"]},
        "file": maybe({"$ref": _REF.format(name="File")}),
    }
)
_MODEL = object_of({"id": TEXT}, {"object": {"const": "model"}, "created": COUNT, "owned_by": TEXT})
_USAGE = object_of(
    {
        "object": {"const": "page"},
        "data": list_of(object_of({"start_time": COUNT, "end_time": COUNT, "num_requests": COUNT})),
        "has_more": {"type": "boolean"},
        "next_page": _WHEN,
    }
)
_STORY = object_of(
    {"routing": maybe({"type": "object"}), "cost": maybe(object_of({"amount_nano_usd": COUNT}))}
)
_ITEMS = object_of(
    {
        "object": {"const": "list"},
        "data": list_of(object_of({"id": TEXT, "type": TEXT})),
        "has_more": {"type": "boolean"},
    }
)
REST_SCHEMAS: dict[str, Json] = {
    "Batch": _BATCH,
    "BatchPage": _page("Batch", object={"const": "list"}),
    "File": _FILE,
    "FilePage": _page("File", object={"const": "list"}),
    "MessageBatch": _MESSAGE_BATCH,
    "MessageBatchPage": _page("MessageBatch"),
    "DeletedMessageBatch": object_of({"id": TEXT, "type": {"const": "message_batch_deleted"}}),
    "Upload": _UPLOAD,
    "UploadPart": object_of(
        {"id": TEXT, "object": {"const": "upload.part"}, "created_at": COUNT, "upload_id": TEXT}
    ),
    "DeletedFile": _deleted("file"),
    "DeletedResponse": _deleted("response"),
    "InputItems": _ITEMS,
    "Model": _MODEL,
    "Models": object_of({"data": list_of({"$ref": _REF.format(name="Model")})}),
    "RequestStory": _STORY,
    "UsagePage": _USAGE,
}

# The schema of each answer, by method and path.
_ANSWERS = {
    "get /v1/models": "Models",
    "get /v1/models/{model}": "Model",
    "post /v1/files": "File",
    "get /v1/files": "FilePage",
    "get /v1/files/{file_id}": "File",
    "delete /v1/files/{file_id}": "DeletedFile",
    "post /v1/uploads": "Upload",
    "post /v1/uploads/{upload_id}/parts": "UploadPart",
    "post /v1/uploads/{upload_id}/complete": "Upload",
    "post /v1/uploads/{upload_id}/cancel": "Upload",
    "post /v1/batches": "Batch",
    "get /v1/batches": "BatchPage",
    "get /v1/batches/{batch_id}": "Batch",
    "post /v1/batches/{batch_id}/cancel": "Batch",
    "post /v1/messages/batches": "MessageBatch",
    "get /v1/messages/batches": "MessageBatchPage",
    "get /v1/messages/batches/{message_batch_id}": "MessageBatch",
    "delete /v1/messages/batches/{message_batch_id}": "DeletedMessageBatch",
    "post /v1/messages/batches/{message_batch_id}/cancel": "MessageBatch",
    "get /v1/responses/{response_id}": "ResponseAnswer",
    "delete /v1/responses/{response_id}": "DeletedResponse",
    "post /v1/responses/{response_id}/cancel": "ResponseAnswer",
    "get /v1/responses/{response_id}/input_items": "InputItems",
    "get /v1/requests/{request_id}": "RequestStory",
    "get /v1/usage": "UsagePage",
}


def _links(param: str, operations: dict[str, str]) -> Json:
    return {
        name: {"operationRef": f"#/paths/{path}", "parameters": {param: "$response.body#/id"}}
        for name, path in operations.items()
    }


# Where the id of what was made leads.
LINKS: dict[str, Json] = {
    "/v1/files": _links(
        "file_id",
        {
            "describe": "~1v1~1files~1{file_id}/get",
            "download": "~1v1~1files~1{file_id}~1content/get",
            "delete": "~1v1~1files~1{file_id}/delete",
        },
    ),
    "/v1/uploads": _links(
        "upload_id",
        {
            "add": "~1v1~1uploads~1{upload_id}~1parts/post",
            "complete": "~1v1~1uploads~1{upload_id}~1complete/post",
            "cancel": "~1v1~1uploads~1{upload_id}~1cancel/post",
        },
    ),
    "/v1/batches": _links(
        "batch_id",
        {
            "describe": "~1v1~1batches~1{batch_id}/get",
            "cancel": "~1v1~1batches~1{batch_id}~1cancel/post",
        },
    ),
    "/v1/messages/batches": _links(
        "message_batch_id",
        {
            "describe": "~1v1~1messages~1batches~1{message_batch_id}/get",
            "cancel": "~1v1~1messages~1batches~1{message_batch_id}~1cancel/post",
        },
    ),
    "/v1/responses": _links(
        "response_id",
        {
            "retrieve": "~1v1~1responses~1{response_id}/get",
            "input": "~1v1~1responses~1{response_id}~1input_items/get",
            "delete": "~1v1~1responses~1{response_id}/delete",
        },
    ),
}
_ERRORS = (
    ("4XX", "What to fix; `param` or the message names the field."),
    ("5XX", "Try again; the message carries the request id."),
)


def error_answers(path: str) -> Json:
    """Return what an operation may answer but what was asked for, in the shape of its API."""
    name = "MessagesError" if path.startswith("/v1/messages") else "Error"
    content = {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}
    return {status: {"description": told, "content": content} for status, told in _ERRORS}


def add_rest_answers(paths: Json) -> None:
    """Complete the operations that FastAPI described: it knows neither our answers nor errors."""
    for path, operations in paths.items():
        for method, operation in operations.items():
            responses = operation["responses"]
            responses.pop("422", None)
            if name := _ANSWERS.get(f"{method} {path}"):
                content = responses["200"]["content"]["application/json"]
                content["schema"] = {"$ref": _REF.format(name=name)}
            if path.startswith("/v1/"):
                operation["security"] = [{"key": []}]
                told = error_answers(path)
                for status in told:
                    responses.setdefault(status, told[status])
            if method == "post" and path == "/v1/files":
                responses["200"]["links"] = LINKS[path]
