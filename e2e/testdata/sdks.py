"""Speaks to shunt with the official clients: sdks.py http://127.0.0.1:PORT CASE... Prints a line for each case, empty
after the colon if all was as a user expects."""

import io
import sys
import traceback

import anthropic
import openai

base = sys.argv[1]
open_ai = openai.OpenAI(base_url=base + "/v1", api_key="sk-canary", max_retries=0, timeout=60)
anthropic_ai = anthropic.Anthropic(base_url=base, api_key="sk-canary", max_retries=0, timeout=60)
hi = [{"role": "user", "content": "hi"}]


def check(ok, what):
    if not ok:
        raise AssertionError(repr(what))


def chat():
    r = ai.chat.completions.create(model="m", messages=hi, max_tokens=5)
    check(r.model == "m" and len(r.choices[0].message.content) == 20 and r.usage.completion_tokens == 5, r)


def chat_stream():
    usage, text, model = None, "", set()
    for c in ai.chat.completions.create(
        model="m", messages=hi, max_tokens=5, stream=True, stream_options={"include_usage": True}
    ):
        model.add(c.model)
        usage = c.usage or usage
        text += "".join(o.delta.content or "" for o in c.choices)
    check(len(text) == 20 and usage.completion_tokens == 5 and model == {"m"}, (text, usage, model))


def chat_renamed():
    rewrite = {"x-llm-d-model-name-rewrite": "m"}
    r = ai.chat.completions.create(model="gpt-5", messages=hi, extra_headers=rewrite)
    check(r.model == "gpt-5", r)
    for c in ai.chat.completions.create(model="gpt-5", messages=hi, stream=True, extra_headers=rewrite):
        check(c.model == "gpt-5", c)


def completions():
    r = ai.completions.create(model="m", prompt=["one", "two"], max_tokens=3)
    check(len(r.choices[0].text) == 12, r)


def embeddings():
    r = ai.embeddings.create(model="m", input=["one", "two"])
    check(len(r.data) == 2 and len(r.data[0].embedding) == 8 and r.usage.total_tokens == 2, r)


def responses():
    r = ai.responses.create(model="m", input="hi", max_output_tokens=5)
    check(r.model == "m" and len(r.output_text) == 20 and r.usage.output_tokens == 5, r)


def responses_stream():
    text, last = "", None
    for e in ai.responses.create(model="m", input="hi", max_output_tokens=5, stream=True):
        if e.type == "response.output_text.delta":
            text += e.delta
        last = e
    check(last.type == "response.completed" and last.response.usage.output_tokens == 5 and len(text) == 20, (text, last))


def responses_renamed():
    rewrite = {"x-llm-d-model-name-rewrite": "m"}
    for e in ai.responses.create(model="gpt-5", input="hi", stream=True, extra_headers=rewrite):
        if hasattr(e, "response"):
            check(e.response.model == "gpt-5", e)


def audio():
    file = io.BytesIO(bytes(300_000))
    file.name = "speech.wav"
    r = ai.audio.transcriptions.create(model="m", file=file)
    check(r.text == "a file of 300000 bytes", r)
    file.seek(0)
    r = ai.audio.translations.create(model="m", file=file)
    check(r.text == "a file of 300000 bytes", r)


def models():
    check([m.id for m in ai.models.list()] == ["m"], "the list of models")


def unknown_model():
    try:
        r = ai.chat.completions.create(model="nobody", messages=hi)
    except openai.BadRequestError as e:
        check(e.code == "model_not_found" and e.param == "model" and e.type == "invalid_request_error", e.body)
    else:
        check(False, r)


def messages():
    r = claude.messages.create(model="m", messages=hi, max_tokens=5)
    check(r.model == "m" and len(r.content[0].text) == 20 and r.usage.output_tokens == 5, r)


def messages_stream():
    with claude.messages.stream(model="m", messages=hi, max_tokens=5) as s:
        text = "".join(s.text_stream)
        r = s.get_final_message()
    check(len(text) == 20 and r.model == "m" and r.usage.output_tokens == 5, (text, r))


def messages_renamed():
    rewrite = {"x-llm-d-model-name-rewrite": "m"}
    with claude.messages.stream(model="claude", messages=hi, max_tokens=5, extra_headers=rewrite) as s:
        check(s.get_final_message().model == "claude", "the model's name")


def count_tokens():
    r = claude.messages.count_tokens(model="m", messages=hi)
    check(r.input_tokens == 6, r)


def messages_unknown_model():
    try:
        r = claude.messages.create(model="nobody", messages=hi, max_tokens=5)
    except anthropic.APIStatusError as e:
        check(e.status_code == 400 and e.body["error"]["type"] == "not_found_error", e.body)
    else:
        check(False, r)


for case in sys.argv[2:]:
    ai = open_ai.with_options(default_headers={"x-test-id": case})
    claude = anthropic_ai.with_options(default_headers={"x-test-id": case})
    said = ""
    try:
        globals()[case]()
    except Exception:
        said = traceback.format_exc().replace("\n", " | ")
    print(f"{case}: {said}", flush=True)
