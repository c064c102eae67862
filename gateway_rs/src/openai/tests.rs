//! Bodies, good and bad: what each is refused for, and as what the good ones are understood.

use std::time::Duration;

use proptest::prelude::*;
use serde_json::{json, Value};

use super::{chat, completions, tokens};
use crate::error::{ApiError, ErrorCode};
use crate::request::{ChatMessage, Class, Content, Door, Limits, Prompt, Request, Role, SamplingDraft, ToolChoice};
use crate::schema::Guided;
use crate::tools::ToolFormat;

const CONTEXT: u32 = 64;

fn limits() -> Limits {
    Limits::new(902, CONTEXT)
}

/// Case R(text, {…}): a chat of one message with these fields beside it, up to the tokens it may produce.
fn chat_request(more: &str) -> Result<Request, ApiError> {
    let body = format!(r#"{{"model":"toy","messages":[{{"role":"user","content":"1234567"}}]{more}}}"#);
    let request = chat::parse(body.as_bytes())?.validate(&limits())?;
    request.resolve_max_tokens("1234567".len(), CONTEXT)?;
    Ok(request)
}

fn chat_with(more: &str) -> Request {
    chat_request(&format!(",{more}")).expect(more)
}

fn completion_request(more: &str) -> Result<Request, ApiError> {
    let body = format!(r#"{{"model":"toy","prompt":"1234567"{more}}}"#);
    let request = completions::parse(body.as_bytes())?.validate(&limits())?;
    request.resolve_max_tokens("1234567".len(), CONTEXT)?;
    Ok(request)
}

fn completion_with(more: &str) -> Request {
    completion_request(&format!(",{more}")).expect(more)
}

/// Both interfaces refuse that, and name that field.
fn refused(more: &str, param: &str) {
    for request in [chat_request, completion_request] {
        refusal(request(&format!(",{more}")), more, param);
    }
}

fn refused_chat(more: &str, param: &str) {
    refusal(chat_request(&format!(",{more}")), more, param);
}

fn refused_completion(more: &str, param: &str) {
    refusal(completion_request(&format!(",{more}")), more, param);
}

fn refusal(result: Result<Request, ApiError>, more: &str, param: &str) {
    let error = result.expect_err(more);
    assert_eq!(error.http_status(), 400, "{more}: {error}");
    assert_eq!(error.param.as_deref(), Some(param), "{more}: {error}");
}

#[test]
fn a_plain_request_has_the_defaults() {
    let request = chat_request("").expect("a plain request");
    assert_eq!(request.door, Door::Chat);
    assert_eq!(request.model, "toy");
    assert_eq!(request.sampling.temperature, 1.0);
    assert_eq!(
        (request.sampling.top_p, request.sampling.top_k, request.sampling.min_p),
        (1.0, 0, 0.0)
    );
    assert_eq!(request.sampling.repetition_penalty, 1.0);
    assert_eq!((request.sampling.n, request.sampling.seed), (1, None));
    assert_eq!(request.stopping.max_tokens, None);
    assert_eq!(request.resolve_max_tokens(7, CONTEXT), Ok(57));
    assert_eq!(
        (request.stream, request.include_usage, request.echo),
        (false, false, false)
    );
    assert_eq!((request.deadline, request.class), (None, Class::Standard));
    assert!(!request.is_deterministic());
    let Prompt::Chat(prompt) = &request.prompts[0] else {
        unreachable!("a chat")
    };
    assert_eq!(prompt.messages, [ChatMessage::text(Role::User, "1234567")]);
    assert!(prompt.add_generation_prompt);
}

#[test]
fn sampling_is_held_to_its_ranges() {
    for value in ["-0.1", "2.5", "\"hot\"", "true", "[1]"] {
        refused(&format!("\"temperature\":{value}"), "temperature");
    }
    refused(r#""top_p":1.5"#, "top_p");
    refused(r#""top_p":-0.1"#, "top_p");
    refused(r#""top_k":0.01"#, "top_k");
    refused(r#""top_k":-2"#, "top_k");
    refused(r#""min_p":2"#, "min_p");
    refused(r#""repetition_penalty":0"#, "repetition_penalty");
    refused(r#""frequency_penalty":2.1"#, "frequency_penalty");
    refused(r#""presence_penalty":-3"#, "presence_penalty");
    for n in ["0", "1000000", "-1", "1.5", "\"1\""] {
        refused(&format!("\"n\":{n}"), "n");
    }
    for seed in ["\"x\"", "1.5", "[]", "1e30"] {
        refused(&format!("\"seed\":{seed}"), "seed");
    }
    let sampling =
        chat_with(r#""temperature":2,"top_p":0.5,"top_k":-1,"min_p":1,"n":16,"repetition_penalty":1.5"#).sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (2.0, 0.5, 0));
    assert_eq!(
        (sampling.min_p, sampling.n, sampling.repetition_penalty),
        (1.0, 16, 1.5)
    );
}

#[test]
fn a_models_defaults_are_for_requests_that_say_nothing_of_sampling() {
    let of_the_model = SamplingDraft {
        temperature: Some(0.2),
        top_p: Some(0.5),
        repetition_penalty: Some(1.1),
        ..SamplingDraft::default()
    };
    let drawn = |more: &str| {
        let body = format!(r#"{{"model":"toy","messages":[{{"role":"user","content":"hi"}}]{more}}}"#);
        let limits = Limits {
            sampling: of_the_model.clone(),
            ..limits()
        };
        let sampling = chat::parse(body.as_bytes())
            .and_then(|draft| draft.validate(&limits))
            .expect(more)
            .sampling;
        (sampling.temperature, sampling.top_p, sampling.repetition_penalty)
    };
    assert_eq!(drawn(""), (0.2, 0.5, 1.1));
    assert_eq!(drawn(r#","n":2,"seed":7,"logit_bias":{"5":1}"#), (0.2, 0.5, 1.1));
    // All or nothing.
    assert_eq!(drawn(r#","temperature":0"#), (0.0, 1.0, 1.0));
    for field in ["top_k", "min_p", "frequency_penalty", "presence_penalty"] {
        assert_eq!(drawn(&format!(",\"{field}\":0")), (1.0, 1.0, 1.0), "{field}");
    }
    assert_eq!(drawn(r#","top_p":0.9"#), (1.0, 0.9, 1.0));
    assert_eq!(drawn(r#","repetition_penalty":1.2"#), (1.0, 1.0, 1.2));
}

#[test]
fn top_p_of_nothing_is_the_likeliest_alone() {
    let sampling = chat_with(r#""top_p":0"#).sampling;
    assert_eq!((sampling.top_p, sampling.top_k), (1.0, 1));
    assert!(chat_with(r#""top_p":0"#).is_deterministic());
}

#[test]
fn a_seed_is_any_number_of_64_bits() {
    assert_eq!(chat_with(r#""seed":42"#).sampling.seed, Some(42));
    assert_eq!(chat_with(r#""seed":-1"#).sampling.seed, Some(u64::MAX));
    assert_eq!(
        chat_with(r#""seed":18446744073709551615"#).sampling.seed,
        Some(u64::MAX)
    );
    assert_eq!(chat_with(r#""seed":null"#).sampling.seed, None);
}

#[test]
fn choices_have_seeds_of_their_own() {
    let request = chat_with(r#""seed":42,"n":3"#);
    let seeds = request.seeds(|| unreachable!("the client gave one"));
    assert_eq!((seeds.len(), seeds[0]), (3, 42));
    assert_eq!(seeds, request.seeds(|| 7));
    let neighbour = chat_with(r#""seed":43,"n":3"#).seeds(|| 7);
    assert!(seeds.iter().all(|seed| !neighbour.contains(seed)));
    assert!(seeds[1] != seeds[2] && seeds[0] != seeds[1] && seeds[0] != seeds[2]);
    assert_eq!(chat_with(r#""n":2"#).seeds(|| 7)[0], 7);
}

#[test]
fn lengths() {
    for tokens in ["0", "-1", "1.5", "\"ten\""] {
        refused(&format!("\"max_tokens\":{tokens}"), "max_tokens");
        refused_chat(&format!("\"max_completion_tokens\":{tokens}"), "max_completion_tokens");
    }
    assert_eq!(chat_with(r#""max_tokens":57"#).resolve_max_tokens(7, CONTEXT), Ok(57));
    assert_eq!(chat_with(r#""max_tokens":5.0"#).stopping.max_tokens, Some(5));
    for (tokens, param) in [
        ("max_tokens", "max_tokens"),
        ("max_completion_tokens", "max_completion_tokens"),
    ] {
        for asked in ["58", "4294967296", "99999999999999999999", "1e300"] {
            let error = chat_request(&format!(",\"{tokens}\":{asked}")).expect_err(asked);
            assert_eq!(error.openai_code(), "context_length_exceeded");
            assert_eq!(error.http_status(), 400);
            assert_eq!(error.param.as_deref(), Some(param));
            assert!(error.message.contains("64") && error.message.contains('7'), "{error}");
        }
    }
    let error = chat_with(r#""max_tokens":58,"max_tokens":57"#)
        .resolve_max_tokens(8, CONTEXT)
        .expect_err("one over");
    assert!(error.message.contains('8') && error.message.contains("57"), "{error}");
    refused_chat(r#""max_tokens":5,"max_completion_tokens":6"#, "max_completion_tokens");
    let both = chat_with(r#""max_tokens":5,"max_completion_tokens":5"#);
    assert_eq!(both.stopping.max_tokens, Some(5));
    refused(r#""max_tokens":5,"min_tokens":6"#, "min_tokens");
    refused(r#""min_tokens":-1"#, "min_tokens");
    refused(r#""min_tokens":58"#, "min_tokens");
    assert_eq!(chat_with(r#""max_tokens":5,"min_tokens":5"#).stopping.min_tokens, 5);
}

#[test]
fn a_prompt_that_fills_the_context() {
    let request = chat_request("").expect("a request");
    for tokens in [64, 65, usize::MAX] {
        let error = request.resolve_max_tokens(tokens, CONTEXT).expect_err("full");
        assert_eq!(error.code, ErrorCode::ContextLengthExceeded);
        assert_eq!(error.param.as_deref(), Some("messages"));
        assert!(
            error.message.contains("64") && error.message.contains(&tokens.to_string()),
            "{error}"
        );
    }
    assert_eq!(request.resolve_max_tokens(63, CONTEXT), Ok(1));
    assert_eq!(
        request.resolve_max_tokens(0, CONTEXT).expect_err("empty").code,
        ErrorCode::InvalidArgument
    );
    assert_eq!(
        request.prompt_too_long(70, CONTEXT).openai_code(),
        "context_length_exceeded"
    );
}

#[test]
fn an_echo_alone_is_legal_where_there_is_an_echo() {
    let request = completion_with(r#""echo":true,"max_tokens":0"#);
    assert_eq!(request.resolve_max_tokens(7, CONTEXT), Ok(0));
    assert_eq!(request.resolve_max_tokens(64, CONTEXT), Ok(0));
    assert!(request.resolve_max_tokens(65, CONTEXT).is_err());
    refused_completion(r#""max_tokens":0"#, "max_tokens");
    refused_chat(r#""echo":true,"max_tokens":0"#, "max_tokens");
}

#[test]
fn logit_biases() {
    for bias in [
        r#"{"AI":-100}"#,
        r#"{"999999":1}"#,
        r#"{"5":101}"#,
        r#"{"5":"a"}"#,
        r#"{"-1":1}"#,
        "[1]",
        r#"{"5":null}"#,
    ] {
        refused(&format!("\"logit_bias\":{bias}"), "logit_bias");
    }
    let many: Vec<String> = (0..1025).map(|id| format!("\"{id}\":1")).collect();
    refused(&format!("\"logit_bias\":{{{}}}", many.join(",")), "logit_bias");
    let request = chat_with(r#""logit_bias":{"9":1.5,"5":-100}"#);
    assert_eq!(request.sampling.logit_bias, [(5, -100.0), (9, 1.5)]);
}

#[test]
fn logprobs_of_a_chat() {
    refused_chat(r#""top_logprobs":3"#, "top_logprobs");
    refused_chat(r#""logprobs":false,"top_logprobs":3"#, "top_logprobs");
    refused_chat(r#""logprobs":true,"top_logprobs":21"#, "top_logprobs");
    refused_chat(r#""logprobs":true,"top_logprobs":-1"#, "top_logprobs");
    refused_chat(r#""logprobs":1"#, "logprobs");
    assert_eq!(chat_with(r#""logprobs":true"#).logprobs, Some(0));
    assert_eq!(chat_with(r#""logprobs":true,"top_logprobs":20"#).logprobs, Some(20));
    assert_eq!(chat_with(r#""logprobs":false"#).logprobs, None);
}

#[test]
fn logprobs_of_a_completion() {
    for value in ["6", "-1", "true", "1.5"] {
        refused_completion(&format!("\"logprobs\":{value}"), "logprobs");
    }
    assert_eq!(completion_with(r#""logprobs":0"#).logprobs, Some(0));
    assert_eq!(completion_with(r#""logprobs":5"#).logprobs, Some(5));
    assert_eq!(completion_request("").expect("a request").logprobs, None);
}

#[test]
fn stops() {
    for stop in [
        r#"[""]"#,
        r#""""#,
        r#"["a","b","c","d","e"]"#,
        "[7]",
        "7",
        r#"{"a":1}"#,
        "[null]",
    ] {
        refused(&format!("\"stop\":{stop}"), "stop");
    }
    refused(&format!("\"stop\":\"{}\"", "x".repeat(1025)), "stop");
    refused(r#""stop_token_ids":[902]"#, "stop_token_ids");
    refused(r#""stop_token_ids":["a"]"#, "stop_token_ids");
    refused(r#""stop_token_ids":7"#, "stop_token_ids");
    for none in ["null", "[]"] {
        assert!(chat_with(&format!("\"stop\":{none}")).stopping.stop.is_empty());
    }
    assert_eq!(chat_with(r#""stop":"\nEND""#).stopping.stop, ["\nEND"]);
    let stopping = chat_with(
        r#""stop":["a","b","c","d"],"stop_token_ids":[901],"include_stop_str_in_output":true,"ignore_eos":true"#,
    )
    .stopping;
    assert_eq!(stopping.stop, ["a", "b", "c", "d"]);
    assert_eq!(stopping.stop_ids, [901]);
    assert!(stopping.include_stop && stopping.ignore_eos);
}

#[test]
fn streams() {
    refused(r#""stream_options":{"include_usage":true}"#, "stream_options");
    refused(
        r#""stream":false,"stream_options":{"include_usage":true}"#,
        "stream_options",
    );
    refused(r#""stream":true,"stream_options":7"#, "stream_options");
    refused(
        r#""stream":true,"stream_options":{"include_usage":1}"#,
        "stream_options.include_usage",
    );
    refused(r#""stream":"yes""#, "stream");
    let request = chat_with(r#""stream":true,"stream_options":{"include_usage":true,"include_obfuscation":false}"#);
    assert!(request.stream && request.include_usage);
    assert!(!chat_with(r#""stream":true,"stream_options":{}"#).include_usage);
    assert!(!chat_with(r#""stream":false,"stream_options":null"#).stream);
}

#[test]
fn deadlines_and_classes() {
    assert_eq!(
        chat_with(r#""deadline_ms":350"#).deadline,
        Some(Duration::from_millis(350))
    );
    assert_eq!(chat_with(r#""deadline_ms":0"#).deadline, Some(Duration::ZERO));
    for ms in ["-1", "\"soon\"", "3600001", "1e300"] {
        refused(&format!("\"deadline_ms\":{ms}"), "deadline_ms");
    }
    assert_eq!(chat_with(r#""class":"batch""#).class, Class::Batch);
    assert_eq!(chat_with(r#""service_tier":"priority""#).class, Class::Interactive);
    assert_eq!(chat_with(r#""service_tier":"auto""#).class, Class::Standard);
    refused(r#""class":"vip""#, "class");
    refused(r#""quality":"best""#, "quality");
    refused(r#""quality":"routed""#, "quality");
    refused(r#""service_tier":"vip""#, "service_tier");
}

#[test]
fn labels_and_switches() {
    let request = chat_with(r#""lora":"x","session_id":"s","bypass_cache":true,"bypass_prefix_cache":true,"user":"u""#);
    assert_eq!(
        (request.lora.as_deref(), request.session_id.as_deref()),
        (Some("x"), Some("s"))
    );
    assert!(request.bypass_cache && request.bypass_prefix_cache);
    assert_eq!(chat_with(r#""lora":"""#).lora, None);
    refused(&format!("\"session_id\":\"{}\"", "x".repeat(257)), "session_id");
    refused(r#""user":7"#, "user");
    refused(r#""bypass_cache":"no""#, "bypass_cache");
}

#[test]
fn a_body_must_be_a_json_object() {
    let bodies: [&[u8]; 9] = [
        b"",
        b"hello",
        b"{\"model\":\"toy\",\"temperature\":NaN}",
        b"{\"model\":\"toy\"",
        b"[]",
        b"7",
        b"{\"model\":\"\xff\"}",
        b"{\"model\":\"\\ud800\"}",
        b"{} {}",
    ];
    let deep = "[".repeat(100_000);
    for body in bodies.into_iter().chain([deep.as_bytes()]) {
        for error in [
            chat::parse(body).expect_err("no body"),
            completions::parse(body).expect_err("no body"),
            tokens::parse_tokenize(body).expect_err("no body"),
            tokens::parse_detokenize(body).expect_err("no body"),
        ] {
            assert_eq!(
                (error.http_status(), error.openai_type()),
                (400, "invalid_request_error")
            );
        }
    }
}

#[test]
fn a_body_of_too_many_values_is_refused_before_it_is_read() {
    let body = format!(r#"{{"model":"toy","prompt":[{}1]}}"#, "1,".repeat(1_000_001));
    let error = completions::parse(body.as_bytes()).expect_err("too many");
    assert_eq!(error.http_status(), 413);
    let text = format!(r#"{{"model":"toy","prompt":"{}\"[{{,"}}"#, "1,".repeat(1_000_001));
    assert!(
        completions::parse(text.as_bytes()).is_ok(),
        "a text is one value, whatever is in it"
    );
}

#[test]
fn models() {
    for body in [
        r#"{"messages":[]}"#,
        r#"{"model":null}"#,
        r#"{"model":7}"#,
        r#"{"model":""}"#,
    ] {
        assert_eq!(
            chat::parse(body.as_bytes()).expect_err(body).param.as_deref(),
            Some("model")
        );
    }
}

#[test]
fn messages_are_needed_and_checked() {
    for (messages, param) in [
        ("", "messages"),
        (r#","messages":[]"#, "messages"),
        (r#","messages":null"#, "messages"),
        (r#","messages":"hi""#, "messages"),
        (r#","messages":["hi"]"#, "messages[0]"),
        (r#","messages":[{"role":"boss","content":"x"}]"#, "messages[0].role"),
        (r#","messages":[{"content":"x"}]"#, "messages[0].role"),
        (r#","messages":[{"role":7,"content":"x"}]"#, "messages[0].role"),
        (r#","messages":[{"role":"user"}]"#, "messages[0].content"),
        (r#","messages":[{"role":"user","content":null}]"#, "messages[0].content"),
        (r#","messages":[{"role":"user","content":7}]"#, "messages[0].content"),
        (
            r#","messages":[{"role":"user","content":["a"]}]"#,
            "messages[0].content[0]",
        ),
        (
            r#","messages":[{"role":"user","content":[{"type":"text"}]}]"#,
            "messages[0].content[0].text",
        ),
        (
            r#","messages":[{"role":"user","content":[{"text":"a"}]}]"#,
            "messages[0].content[0].type",
        ),
        (
            r#","messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{}}]}]"#,
            "messages[0].content[1].type",
        ),
        (
            r#","messages":[{"role":"user","content":"x","name":7}]"#,
            "messages[0].name",
        ),
        (
            r#","messages":[{"role":"user","content":"x","tool_calls":[{"function":{"name":"f"}}]}]"#,
            "messages[0].tool_calls",
        ),
        (
            r#","messages":[{"role":"assistant","tool_calls":7}]"#,
            "messages[0].tool_calls",
        ),
        (
            r#","messages":[{"role":"assistant","tool_calls":[7]}]"#,
            "messages[0].tool_calls[0]",
        ),
        (
            r#","messages":[{"role":"assistant","tool_calls":[{}]}]"#,
            "messages[0].tool_calls[0].function",
        ),
        (
            r#","messages":[{"role":"assistant","tool_calls":[{"function":{}}]}]"#,
            "messages[0].tool_calls[0].function.name",
        ),
        (
            r#","messages":[{"role":"assistant","tool_calls":[{"type":"custom","function":{"name":"f"}}]}]"#,
            "messages[0].tool_calls[0].type",
        ),
    ] {
        let body = format!(r#"{{"model":"toy"{messages}}}"#);
        let error = chat::parse(body.as_bytes()).expect_err(messages);
        assert_eq!(
            (error.http_status(), error.param.as_deref()),
            (400, Some(param)),
            "{messages}: {error}"
        );
    }
}

fn messages_of(messages: &str) -> Vec<ChatMessage> {
    let body = format!(r#"{{"model":"toy","messages":{messages}}}"#);
    let draft = chat::parse(body.as_bytes()).expect(messages);
    match draft.prompts.into_iter().next() {
        Some(Prompt::Chat(chat)) => chat.messages,
        other => unreachable!("a chat is a chat: {other:?}"),
    }
}

#[test]
fn messages_are_put_in_normal_form() {
    let messages = messages_of(
        r#"[{"role":"developer","content":"d"},
            {"role":"user","content":[{"type":"text","text":"A"},{"type":"text","text":"B"}],"name":"ann"},
            {"role":"assistant","content":null,"function_call":{"name":"f","arguments":"{\"a\":1}"}},
            {"role":"function","name":"f","content":"1"},
            {"role":"assistant","content":[{"type":"refusal","refusal":"no"}]},
            {"role":"assistant","refusal":"never","reasoning_content":"hm"},
            {"role":"assistant"}]"#,
    );
    assert_eq!(messages[0], ChatMessage::text(Role::Developer, "d"));
    assert_eq!(messages[1].content, Content::Parts(vec!["A".into(), "B".into()]));
    assert_eq!(messages[1].name.as_deref(), Some("ann"));
    assert_eq!(messages[2].content, Content::Absent);
    assert_eq!(messages[2].tool_calls[0].name, "f");
    assert_eq!(messages[2].tool_calls[0].arguments["a"], 1);
    assert_eq!((messages[3].role, messages[3].name.as_deref()), (Role::Tool, Some("f")));
    assert_eq!(messages[4].content, Content::Parts(vec!["no".into()]));
    assert_eq!(messages[5].content, Content::Text("never".into()));
    assert_eq!(messages[5].reasoning.as_deref(), Some("hm"));
    assert_eq!(messages[6].content, Content::Absent);
}

#[test]
fn tools() {
    for (more, param) in [
        (r#""tools":7"#, "tools"),
        (r#""tools":[7]"#, "tools[0]"),
        (r#""tools":[{"type":"web"}]"#, "tools[0].type"),
        (r#""tools":[{"type":"function"}]"#, "tools[0].function"),
        (
            r#""tools":[{"type":"function","function":{}}]"#,
            "tools[0].function.name",
        ),
        (
            r#""tools":[{"type":"function","function":{"name":"f","parameters":7}}]"#,
            "tools[0].function.parameters",
        ),
        (r#""tool_choice":"required""#, "tool_choice"),
        (r#""tool_choice":"maybe""#, "tool_choice"),
        (r#""tool_choice":7"#, "tool_choice"),
        (
            r#""tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"custom","custom":{"name":"f"}}"#,
            "tool_choice",
        ),
        (
            r#""tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"function","function":{"name":"g"}}"#,
            "tool_choice",
        ),
        (
            r#""tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required","response_format":{"type":"json_object"}"#,
            "tool_choice",
        ),
        (r#""parallel_tool_calls":1"#, "parallel_tool_calls"),
    ] {
        refused_chat(more, param);
    }
    let offered = |more: &str| match &chat_with(more).prompts[0] {
        Prompt::Chat(chat) => chat.tools.len(),
        other => unreachable!("a chat is a chat: {other:?}"),
    };
    assert_eq!(offered(r#""tools":[{"type":"function","function":{"name":"f"}}]"#), 1);
    assert_eq!(offered(r#""functions":[{"name":"f"}]"#), 1);
    let none = r#""tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"none""#;
    assert_eq!((offered(none), chat_with(none).tool_choice), (0, ToolChoice::None));
    for choice in [r#""required""#, r#"{"type":"function","function":{"name":"f"}}"#] {
        let forced = chat_with(&format!(
            r#""tools":[{{"type":"function","function":{{"name":"f"}}}}],"parallel_tool_calls":false,"tool_choice":{choice}"#
        ));
        assert!(matches!(&forced.guided, Some(Guided::JsonSchema(schema)) if schema.contains(r#"{"const":"f"}"#)));
        let rules = forced.tool_rules(None, || 1).expect("tools were offered");
        assert_eq!(
            (rules.format, &*rules.names, rules.only_one),
            (ToolFormat::Bare, &["f".to_owned()][..], true)
        );
    }
}

#[test]
fn forms_of_answer() {
    for format in [
        r#"{"type":"yaml"}"#,
        r#"{"type":"json_schema"}"#,
        r#"{"type":"json_schema","json_schema":{}}"#,
        r#"{"type":"json_schema","json_schema":{"schema":7}}"#,
        r#"{"type":"json_schema","json_schema":7}"#,
        r#"{"type":"json_schema","json_schema":{"schema":{"type":"string","pattern":"foo**"}}}"#,
        r#"{"type":"json_schema","json_schema":{"strict":true,"schema":{"type":"integer","minimum":1}}}"#,
        r#"{"type":"json_schema","json_schema":{"strict":"yes","schema":{"type":"integer"}}}"#,
        r#"{}"#,
        "7",
    ] {
        refused(&format!("\"response_format\":{format}"), "response_format");
    }
    for none in ["null", r#"{"type":"text"}"#] {
        assert_eq!(chat_with(&format!("\"response_format\":{none}")).guided, None);
    }
    assert_eq!(
        chat_with(r#""response_format":{"type":"json_object"}"#).guided,
        Some(Guided::JsonObject)
    );
    let schema = r#"{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"integer"}},"required":["a"]}"#;
    let format = format!(
        r#""response_format":{{"type":"json_schema","json_schema":{{"name":"x","strict":true,"schema":{schema}}}}}"#
    );
    assert_eq!(
        chat_with(&format).guided,
        Some(Guided::JsonSchema(schema.into())),
        "in its own order"
    );
    for more in [
        format!("\"guided_json\":{schema}"),
        format!("\"guided_json\":{}", json!(schema)),
    ] {
        assert_eq!(completion_with(&more).guided, Some(Guided::JsonSchema(schema.into())));
    }
}

#[test]
fn a_keyword_that_is_not_enforced_is_named() {
    let more = r#","response_format":{"type":"json_schema","json_schema":{"strict":true,"schema":{"type":"integer","minimum":1}}}"#;
    let error = chat_request(more).expect_err("strict");
    assert!(error.message.contains("'minimum'"), "{error}");
    assert!(chat_request(&more.replace("true", "false")).is_ok());
}

#[test]
fn vllm_guidance() {
    assert_eq!(
        chat_with(r#""guided_regex":"[ab]+""#).guided,
        Some(Guided::Regex("[ab]+".into()))
    );
    assert_eq!(
        chat_with(r#""guided_grammar":"root ::= \"a\"""#).guided,
        Some(Guided::Grammar("root ::= \"a\"".into()))
    );
    assert_eq!(
        chat_with(r#""guided_choice":["yes","no"]"#).guided,
        Some(Guided::Choice(vec!["yes".into(), "no".into()]))
    );
    refused(r#""guided_regex":"(""#, "guided_regex");
    refused(r#""guided_regex":"a**""#, "guided_regex");
    refused(r#""guided_grammar":"""#, "guided_grammar");
    refused(r#""guided_choice":[]"#, "guided_choice");
    refused(r#""guided_choice":[7]"#, "guided_choice");
    refused(r#""guided_choice":[""]"#, "guided_choice");
    refused(r#""guided_json":7"#, "guided_json");
    refused(r#""guided_json":{"type":"integer","minimum":1}"#, "guided_json");
    refused(r#""guided_regex":"a","guided_choice":["a"]"#, "guided_choice");
    refused(
        r#""response_format":{"type":"json_object"},"guided_regex":"a""#,
        "guided_regex",
    );
}

#[test]
fn what_is_not_done_is_refused_by_name() {
    refused_completion(r#""suffix":"x""#, "suffix");
    refused_completion(r#""best_of":2"#, "best_of");
    refused_completion(r#""n":2,"best_of":1"#, "best_of");
    refused_chat(r#""chat_template":"x""#, "chat_template");
    refused_chat(r#""continue_final_message":true"#, "continue_final_message");
    assert!(completion_request(r#","n":2,"best_of":2,"suffix":null"#).is_ok());
    assert!(chat_request(r#","continue_final_message":false"#).is_ok());
    assert!(chat_request(r#","skip_special_tokens":false,"store":true,"metadata":{"a":[1]},"nonsense":7"#).is_ok());
}

#[test]
fn prompts_of_a_completion() {
    let prompts = |prompt: &str| {
        let body = format!(r#"{{"model":"toy","prompt":{prompt}}}"#);
        completions::parse(body.as_bytes())
            .and_then(|draft| draft.validate(&limits()))
            .map(|request| request.prompts)
    };
    assert_eq!(prompts(r#""a""#), Ok(vec![Prompt::Text("a".into())]));
    assert_eq!(
        prompts(r#"["a","b"]"#),
        Ok(vec![Prompt::Text("a".into()), Prompt::Text("b".into())])
    );
    assert_eq!(prompts("[1,2]"), Ok(vec![Prompt::Ids(vec![1, 2])]));
    assert_eq!(
        prompts("[[1],[2,3]]"),
        Ok(vec![Prompt::Ids(vec![1]), Prompt::Ids(vec![2, 3])])
    );
    let many = format!("[{}\"a\"]", "\"a\",".repeat(128));
    for bad in [
        "null",
        "7",
        "{}",
        "[]",
        "[null]",
        "[-1]",
        "[1.5]",
        "[902]",
        "[1,\"a\"]",
        "[\"a\",1]",
        "[[902]]",
        many.as_str(),
    ] {
        assert_eq!(prompts(bad).expect_err(bad).param.as_deref(), Some("prompt"), "{bad}");
    }
    let body = r#"{"model":"toy","prompt":["a","b","c"],"n":16}"#;
    let request = completions::parse(body.as_bytes())
        .expect(body)
        .validate(&limits())
        .expect(body);
    assert_eq!(request.total_choices(), 48);
}

#[test]
fn tokenizing() {
    let text = tokens::parse_tokenize(br#"{"model":"toy","prompt":"ab"}"#).expect("a text");
    assert_eq!(
        (text.prompt, text.add_special_tokens),
        (Prompt::Text("ab".into()), true)
    );
    let chat = tokens::parse_tokenize(
        br#"{"model":"toy","messages":[{"role":"user","content":"x"}],"add_generation_prompt":false}"#,
    )
    .expect("a chat");
    assert!(!chat.add_special_tokens);
    assert!(matches!(chat.prompt, Prompt::Chat(chat) if !chat.add_generation_prompt));
    let param = |body: &[u8]| tokens::parse_tokenize(body).expect_err("bad").param;
    assert_eq!(param(br#"{"model":"toy"}"#).as_deref(), Some("prompt"));
    assert_eq!(param(br#"{"prompt":"x"}"#).as_deref(), Some("model"));
    assert_eq!(param(br#"{"model":"toy","prompt":7}"#).as_deref(), Some("prompt"));
    assert_eq!(
        tokens::tokenize_body(&[1, 20], 64),
        br#"{"count":2,"max_model_len":64,"tokens":[1,20]}"#
    );
    let ids = tokens::parse_detokenize(br#"{"model":"toy","tokens":[1,20]}"#).expect("ids");
    assert_eq!(ids.ids, [1, 20]);
    for body in [
        r#"{"model":"toy"}"#,
        r#"{"model":"toy","tokens":["a"]}"#,
        r#"{"model":"toy","tokens":[-1]}"#,
    ] {
        assert_eq!(
            tokens::parse_detokenize(body.as_bytes())
                .expect_err(body)
                .param
                .as_deref(),
            Some("tokens")
        );
    }
    assert_eq!(tokens::detokenize_body("a\"b"), br#"{"prompt":"a\"b"}"#);
}

const NAMES: &[&str] = &[
    "model",
    "messages",
    "prompt",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "tools",
    "tool_choice",
    "echo",
    "best_of",
    "suffix",
    "deadline_ms",
    "class",
    "quality",
    "lora",
    "chat_template_kwargs",
    "role",
    "content",
    "type",
    "text",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "json_schema",
    "schema",
    "properties",
    "items",
    "$ref",
    "pattern",
    "enum",
    "anyOf",
    "allOf",
    "required",
    "strict",
    "functions",
    "tokens",
    "user",
    "service_tier",
];

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-3_i64..3).prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
        prop::sample::select(vec![
            "toy",
            "user",
            "assistant",
            "tool",
            "text",
            "function",
            "auto",
            "json_schema",
            "object",
            "array",
            "string",
            "{}",
            "^a*$",
            "#/properties",
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 48, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((prop::sample::select(NAMES), inner), 0..6).prop_map(|fields| fields
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect()),
        ]
    })
}

proptest! {
    /// Whatever it is, it is understood or refused as the caller's error; and a refusal names what was sent.
    #[test]
    fn no_json_makes_it_panic(
        fields in prop::collection::vec((prop::sample::select(NAMES), any_json()), 0..8),
        base in any::<bool>(),
    ) {
        let mut body = serde_json::Map::new();
        if base {
            body.insert("model".into(), "toy".into());
            body.insert("prompt".into(), "a".into());
            body.insert("messages".into(), json!([{"role": "user", "content": "x"}]));
        }
        body.extend(fields.into_iter().map(|(name, value)| (name.to_owned(), value)));
        let text = serde_json::to_vec(&body).expect("JSON");
        let drafts = [chat::parse(&text), completions::parse(&text)];
        for result in drafts {
            let result = result.and_then(|draft| draft.validate(&limits()));
            match result {
                Ok(request) => { let _ = request.resolve_max_tokens(7, CONTEXT); }
                Err(error) => {
                    prop_assert_eq!(error.http_status(), 400, "{}", error);
                    prop_assert!(error.param.is_some(), "{}", error);
                }
            }
        }
        let _ = (tokens::parse_tokenize(&text), tokens::parse_detokenize(&text));
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = (chat::parse(&bytes), completions::parse(&bytes), tokens::parse_tokenize(&bytes));
    }
}
