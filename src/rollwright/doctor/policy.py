"""The policy: its tokenizer and template here, its engine there, and whether the two are of one policy."""

from __future__ import annotations

import secrets
from dataclasses import replace

from rollwright.doctor import Check, Finding, found, of_error
from rollwright.doctor.subject import Subject
from rollwright.engines import Engine, TellsTemplate
from rollwright.errors import ConfigError, EngineError, EngineRejected, UsageError
from rollwright.messages import Message
from rollwright.run import make_engine, same_tokens
from rollwright.tokens import Renderer

_TOKENS = 4
_TALK = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="Hello."),
    Message(role="assistant", content="Hello, what is it?"),
    Message(role="user", content="Nothing."),
)


def checks(subject: Subject) -> list[Check]:
    return [
        Check(name="policy", look=_policy, fix="set policy.path to the folder with tokenizer.json and its template"),
        Check(name="engine", look=_engine, fix=_engine_fix(subject), seconds=60),
    ]


def _engine_fix(subject: Subject) -> str:
    kind = "" if subject.config is None else subject.config.engine.kind
    return f"start the engine, or correct [engine.{kind}] in the run file"


async def _policy(subject: Subject) -> list[Finding]:
    renderer = await subject.renderer.own()
    return found("policy", "ok", f"{renderer.name}, {renderer.vocab_size} tokens, digest {renderer.fingerprint}")


async def _engine(subject: Subject) -> list[Finding]:
    config = subject.config
    assert config is not None
    renderer = await subject.renderer.get()
    try:
        async with make_engine(config, renderer) as engine:
            same = await _tokenizer(engine, renderer)
            try:
                return [*await _answers(engine, renderer, subject), *same]
            except EngineError as error:  # what was seen of the tokenizer stays
                return [of_error("engine", error, _engine_fix(subject)), *same]
    except (EngineError, UsageError) as error:
        return [of_error("engine", error, _engine_fix(subject)), *found("tokenizer", "skipped", "needs the engine")]


async def _tokenizer(engine: Engine, renderer: Renderer) -> list[Finding]:
    """Whether the engine would read our ids as we mean them."""
    fix = "give policy.path the folder that the engine serves"
    try:
        await engine.check()
        same_tokens(renderer, engine)
    except ConfigError as error:
        if error.details.get("field") != "policy.path":
            raise
        return [of_error("tokenizer", error, fix)]
    if engine.capabilities.fingerprint is not None:
        return found("tokenizer", "ok", "tokenizer and template are the engine's")
    theirs = await engine.rendered(_TALK) if isinstance(engine, TellsTemplate) else None
    if theirs is None:
        return found(
            "tokenizer", "ok", "the engine found nothing wrong with policy.path, and tells no digest to compare"
        )
    if theirs == renderer.render(_TALK, ()):
        return found("tokenizer", "ok", "the engine splits text and renders a conversation as policy.path does")
    seen = "the engine's chat template renders a conversation otherwise than policy.path's, which is the one in use"
    return found("tokenizer", "warn", seen, fix)


async def _answers(engine: Engine, renderer: Renderer, subject: Subject) -> list[Finding]:
    assert subject.config is not None
    prompt = renderer.render([Message(role="user", content="Say hello.")], ())
    sampling = subject.config.sampling.sampling(None)
    has = engine.capabilities
    seen = f"{has.name}, context {has.max_context}, {has.logprob_kind} logprobs"
    if sampling.max_new_tokens >= has.max_context:
        seen = f"a context of {has.max_context} tokens, sampling.max_new_tokens is {sampling.max_new_tokens}"
        return found("engine", "fail", seen, "lower sampling.max_new_tokens")
    try:
        reply = await engine.generate(
            prompt,
            replace(sampling, max_new_tokens=_TOKENS),
            stop_ids=renderer.stop_ids,
            request_id=f"doctor-{secrets.token_hex(8)}",
            session_key="doctor",
        )
    except EngineRejected as error:  # its own check passed, so it is the prompt it does not take
        return [of_error("engine", error, "see what the engine's log says of it", state="warn")]
    versions = ", ".join(dict.fromkeys(span.version for span in reply.versions))
    return found("engine", "ok", f"{seen}; {len(reply.ids)} tokens sampled with logprobs, weights {versions}")
