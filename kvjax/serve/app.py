"""The routes of a server."""

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from kvjax._version import __version__

from .cache_report import CacheSizes
from .errors import APIError
from .guard import CLIENT, App, Guard
from .openapi import limited
from .page import Page
from .preparing import Prompt, listed
from .replies import ChatReply, CompletionReply, Maker
from .schema import ChatRequest, CompletionRequest, ErrorBody, TokenizeRequest
from .serving import Running, Server
from .session_file import Conversation
from .sessions import Sessions, Use
from .sse import ClientGoneError, EventStream, until_disconnect

Prepare = Callable[[Use | None], list[Prompt]]
"""Makes the prompts of a request, which may use a session."""

CLIENT_CLOSED = 499
"""Status of a response that nobody receives, as nginx has it."""


def make_app(server: Server) -> App:
    """The ASGI app of a server. It starts the server, and drains it at the end."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        server.start()
        yield
        await server.drain()

    # Pages with documentation would load scripts of other sites.
    errors: Any = {status: {"model": ErrorBody, "description": about} for status, about in _ERRORS.items()}
    app = FastAPI(
        title="kvjax",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=errors,
    )
    _add_errors(app)
    _add_state(app, server)
    _add_answers(app, server)
    if server.settings.page:
        _add_page(app)
    describe = app.openapi
    app.openapi = lambda: app.openapi_schema or limited(describe(), server)
    return Guard(app, server.settings, app.routes)


def fingerprint(server: Server) -> str:
    """A short text that changes when anything changes that tokens depend on, other than the weights."""
    batch, device = server.batch, jax.devices()[0]
    sizes = batch.rows, batch.specs[0].prompt_len, batch.specs[0].new_tokens, batch.engine.block
    said = __version__, jax.__version__, device.device_kind, server.settings.name, str(batch.policy), sizes
    return f"kvjax-{hashlib.sha256(repr(said).encode()).hexdigest()[:12]}"


def _add_errors(app: FastAPI) -> None:
    """Give all errors OpenAI's format."""

    async def refused(_: Request, error: Any) -> Response:
        return error.response()

    async def invalid(_: Request, error: Any) -> Response:
        return _invalid(error).response()

    async def http(request: Request, error: Any) -> Response:
        code, headers = _CODES.get(error.status_code), dict(error.headers or {})
        if "Allow" in headers:  # of one route, though several may have the path
            routes = [route for route in app.routes if route.matches(request.scope)[0] != Match.NONE]
            headers["Allow"] = ", ".join(sorted({each for route in routes for each in getattr(route, "methods", ())}))
        return APIError(error.status_code, str(error.detail), code=code, headers=headers).response()

    async def failed(_: Request, error: Exception) -> Response:
        return APIError(500, "the server failed; see its log", "server_error").response()

    app.add_exception_handler(APIError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, failed)


_ERRORS = {"4XX": "The request is refused", "5XX": "The server cannot answer now"}
_STREAM: Any = {200: {"description": "The answer, whole or as a stream", "content": {EventStream.media_type: {}}}}
_CODES = {404: "not_found", 405: "method_not_allowed"}


_KIND = re.compile(r"(constrained-|list\[|str$)")
"""Finds names of types in the places of pydantic's errors, which has them where a field may be one of several types."""


def _invalid(error: RequestValidationError) -> APIError:
    """What is wrong with a request, and with which field, as pydantic found it."""
    errors = list(error.errors())
    # Of a field with several types, each type has an error. The one that got furthest is the most helpful.
    worst = max(errors, key=lambda each: (each["type"] == "extra_forbidden", len(each["loc"])))
    places = [str(each) for each in worst["loc"] if each != "body"]
    places = places[:1] + [each for each in places[1:] if not _KIND.match(each)]
    if worst["type"] == "json_invalid":
        return APIError(400, f"the request is not JSON: {worst.get('ctx', {}).get('error', worst['msg'])}")
    name = places[0] if places else None
    where = ".".join(places) or "the request"
    if worst["type"] == "extra_forbidden":
        return APIError(400, f"{where} is not supported; omit it", param=name, code="unsupported_parameter")
    said = worst["msg"].removeprefix("Value error, ")
    return APIError(400, f"{where}: {said[:1].lower()}{said[1:]}", param=name)


def _add_state(app: FastAPI, server: Server) -> None:
    batch, settings = server.batch, server.settings
    model = {
        "id": settings.name,
        "object": "model",
        "created": server.began,
        "owned_by": "kvjax",
        "max_model_len": batch.specs[0].prompt_len + batch.specs[0].new_tokens,
        "kvjax": {
            "policy": str(batch.policy),
            "rows": batch.rows,
            "row_bytes": batch.row_bytes,
            "max_prompt_tokens": batch.specs[0].prompt_len,
            "max_new_tokens": batch.specs[0].new_tokens,
            "prefill_block": batch.engine.block or None,
            "sampling": sorted(batch.sampling),
            "cache_report": settings.reports,
            "sessions": server.sessions is not None,
        },
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        server.preparer.check_model(name)
        return model

    @app.get("/health")
    async def health() -> dict[str, str]:
        if (reason := server.unhealthy()) is not None:
            raise APIError(503, reason, "server_error", code="unhealthy")
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        if server.draining or server.worker.phase != "ready":
            phase = "draining" if server.draining else server.worker.phase
            raise APIError(503, phase, "server_error", code="not_ready", retry_after=1)
        return {"status": "ready"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_page(app: FastAPI) -> None:
    page = Page()

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(page.body, headers=page.headers, media_type="text/html")


def _add_answers(app: FastAPI, server: Server) -> None:
    preparer = server.preparer
    maker = Maker(server.settings.name, fingerprint(server), preparer.tokenizer, CacheSizes(server.batch))

    @app.post("/v1/completions", responses=_STREAM)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        count = preparer.check_count(body, len(listed(body.prompt)), server.most)
        return await answer(
            body, http, count, CompletionReply(maker, body), lambda _: preparer.completion(body, http.scope[CLIENT])
        )

    @app.post("/v1/chat/completions", responses=_STREAM)
    async def chat(body: ChatRequest, http: Request) -> Response:
        count, client, use = preparer.check_count(body, 1, server.most), http.scope[CLIENT], None
        if body.session is not None:
            use = saved_sessions().use(client, body.session)
        return await answer(
            body, http, count, ChatReply(maker, body), lambda use: [preparer.chat(body, client, use)], use
        )

    def saved_sessions() -> Sessions:
        if server.sessions is None:
            refused = "this server saves no sessions; omit session, or start the server with --sessions"
            raise APIError(400, refused, param="session", code="unsupported")
        return server.sessions

    @app.get("/v1/sessions")
    async def sessions(http: Request) -> dict[str, Any]:
        """Saved conversations of this API key, the one that was saved last first."""
        saved = saved_sessions()
        return {"object": "list", "limit": saved.limit, "data": saved.listed(http.scope[CLIENT])}

    @app.get("/v1/sessions/{name}")
    async def one_session(name: str, http: Request) -> dict[str, Any]:
        """A saved conversation with its messages."""
        return await asyncio.to_thread(saved_sessions().one, http.scope[CLIENT], name)

    @app.delete("/v1/sessions/{name}")
    async def delete_session(name: str, http: Request) -> dict[str, Any]:
        """Delete a saved conversation."""
        await asyncio.to_thread(saved_sessions().delete, http.scope[CLIENT], name)
        return {"id": name, "object": "session.deleted", "deleted": True}

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        preparer.check_model(body.model)
        with server.admit(1):
            ids = await server.prepare(preparer.tokenize, body)
        most = preparer.longest + preparer.most_new
        return {"count": len(ids), "max_model_len": most, "tokens": list(ids)}

    async def answer(
        body: CompletionRequest | ChatRequest,
        http: Request,
        count: int,
        reply: CompletionReply | ChatReply,
        prepare: Prepare,
        use: AbstractContextManager[Use] | None = None,
    ) -> Response:
        preparer.check_model(body.model)
        if body.stream:
            settings = server.settings
            times = {"ping_seconds": settings.ping_seconds, "write_seconds": settings.write_seconds}
            return EventStream(_chunks(server, count, reply, prepare, use), **times)
        try:
            return JSONResponse(await until_disconnect(http.receive, _whole(server, count, reply, prepare, use)))
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED)


async def _run(
    server: Server, count: int, prepare: Prepare, session: AbstractContextManager[Use] | None
) -> AsyncGenerator[tuple[Running, list[int]]]:
    """Run a request. Whatever ends this generator ends the request's sequences."""
    with server.admit(count) as admission, session or contextlib.nullcontext() as use:
        prompts = await server.prepare(prepare, use)
        server.metrics.prompted.inc(sum(len(prompt.ids) for prompt in prompts))
        running = Running(server, prompts, admission.began)
        try:
            async for changed in running:
                yield running, changed
            if use is not None:
                running.session = await asyncio.to_thread(_save, use, running)
                yield running, []
        except (GeneratorExit, asyncio.CancelledError):
            server.metrics.cancelled.inc()
            raise
        finally:
            running.close()


def _save(use: Use, running: Running) -> dict[str, Any]:
    """Save the conversation of a request that has ended."""
    (prompt,), (choice,) = running.prompts, running.choices
    assert choice.cache is not None
    text = choice.row.text()
    message = choice.parsing.parser().message(text or "")
    ids = [*map(int, prompt.ids), *choice.row.tokens]
    return use.save(Conversation(ids, choice.cache.tokens, [*prompt.messages, message]), choice.cache.caches)


async def _whole(
    server: Server,
    count: int,
    reply: CompletionReply | ChatReply,
    prepare: Prepare,
    use: AbstractContextManager[Use] | None,
) -> dict[str, Any]:
    found: list[Running] = []
    async with contextlib.aclosing(_run(server, count, prepare, use)) as steps:
        async for running, _ in steps:
            found = [running]
    return reply.whole(*found)


async def _chunks(
    server: Server,
    count: int,
    reply: CompletionReply | ChatReply,
    prepare: Prepare,
    use: AbstractContextManager[Use] | None,
) -> AsyncGenerator[dict[str, Any]]:
    running: Running | None = None
    async with contextlib.aclosing(_run(server, count, prepare, use)) as steps:
        async for running, changed in steps:
            for chunk in reply.chunks(running, changed):
                yield chunk
    assert running is not None
    for chunk in reply.last(running):
        yield chunk
