"""The official `openai` package as a client."""

from collections.abc import Callable
from typing import Any

import pytest
from serve_client import Client


@pytest.fixture(scope="module")
def openai() -> Any:
    """The package, which takes long to import: not in processes that only collect these tests."""
    return pytest.importorskip("openai")


@pytest.fixture
def ask(client: Client, openai: Any) -> Callable[[Callable[[Any], Any]], Any]:
    """Calls a function of an `openai.AsyncOpenAI` in the server's event loop, without sockets."""
    transport = pytest.importorskip("httpx2").ASGITransport(app=client.app)

    async def asked(function: Callable[[Any], Any]) -> Any:
        http = openai.DefaultAsyncHttpxClient(transport=transport)
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
        ) as api:
            return await function(api)

    return lambda function: client.run(asked(function))


MESSAGES = [{"role": "user", "content": "abc"}]


def test_chats(ask: Any) -> None:
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "seed": 3, "logprobs": True, "n": 2}
    whole = ask(lambda api: api.chat.completions.create(**options))
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert "".join(each.token for each in whole.choices[0].logprobs.content).startswith(
        whole.choices[0].message.content
    )

    async def stream(api: Any) -> list[Any]:
        more = {"stream": True, "stream_options": {"include_usage": True}}
        return [chunk async for chunk in await api.chat.completions.create(**options, **more)]

    chunks = ask(stream)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for part in chunk.choices:
            texts[part.index] += part.delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]
    assert chunks[-1].usage == whole.usage


def test_an_answer_can_be_sent_back(ask: Any) -> None:
    """With all fields that the client's own types have."""

    async def talk(api: Any) -> Any:
        options = {"model": "tiny", "max_tokens": 4, "temperature": 0}
        first = await api.chat.completions.create(messages=MESSAGES, **options)
        said = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "d"}]
        return await api.chat.completions.create(messages=said, **options)

    assert ask(talk).choices[0].message.role == "assistant"


def test_completions(ask: Any) -> None:
    options = {"model": "tiny", "prompt": [[1, 2], [3]], "max_tokens": 5, "temperature": 0, "logprobs": 0}
    whole = ask(lambda api: api.completions.create(**options))
    assert len(whole.choices) == 2
    assert len(whole.choices[0].logprobs.tokens) == len(whole.choices[0].logprobs.token_logprobs) <= 5


def test_models_and_errors(ask: Any, openai: Any) -> None:
    async def names(api: Any) -> list[str]:
        return [model.id async for model in api.models.list()]

    assert ask(names) == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="not served here"):
        ask(lambda api: api.chat.completions.create(model="gpt", messages=MESSAGES))
    with pytest.raises(openai.BadRequestError, match="logit_bias: not supported") as refused:
        ask(lambda api: api.chat.completions.create(model="tiny", messages=MESSAGES, logit_bias={"1": 1}))
    assert refused.value.param == "logit_bias"
    with pytest.raises(openai.BadRequestError):
        ask(lambda api: api.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10**6, stream=True))


def test_langchain(client: Client, openai: Any) -> None:
    """LangChain's chat model, whole and in pieces."""
    chat_model = pytest.importorskip("langchain_openai").ChatOpenAI
    transport = pytest.importorskip("httpx2").ASGITransport(app=client.app)

    async def talk() -> tuple[Any, list[Any]]:
        async with openai.DefaultAsyncHttpxClient(transport=transport) as http:
            options = {"model": "tiny", "api_key": "none", "temperature": 0, "max_retries": 0}
            model = chat_model(
                base_url="http://localhost/v1", max_completion_tokens=8, http_async_client=http, **options
            )
            return await model.ainvoke("abc"), [piece async for piece in model.astream("abc")]

    whole, pieces = client.run(talk())
    assert 1 <= whole.usage_metadata["output_tokens"] <= 8
    assert "".join(piece.content for piece in pieces) == whole.content
