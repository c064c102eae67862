//! The names of things by what they depend on: prefix blocks, and answers in the response cache.
//!
//! A *prefix block* is a full block of token ids and all before it; its name is a chain of XXH3-64 over the blocks, begun
//! from a digest of all else that its KV depends on ([`Seed`]). It is a hint for routing: 64 bits can collide, so who
//! reuses KV by it compares the ids. An *answer's* name is a SHA-256 of everything that can change the answer, and is
//! believed.
//!
//! Both begin with an encoding in which fields can't run together: each has its tag and its length.

use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_64;

use crate::request::{Prompt, Request, ToolChoice};
use crate::schema::Guided;

/// The name of no block: the parent of the first one.
pub const NO_PARENT: u64 = 0;

/// What a prompt's KV depends on beside its ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed(u64);

impl Seed {
    /// The seed for a model (with its version), an adapter (empty = none) and a tenant's salt (empty = none).
    #[must_use]
    pub fn new(model: &str, adapter: &str, salt: &[u8]) -> Self {
        let mut fields = Fields::new("headrace prefix block v1");
        fields.bytes("model", model.as_bytes());
        fields.bytes("adapter", adapter.as_bytes());
        fields.bytes("salt", salt);
        let digest = fields.finish();
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        Self(u64::from_le_bytes(first))
    }
}

/// What keeps the KV of one tenant's prompts, and of one salt's among these, apart from all others': it enters every name,
/// and goes along to the worker, whose engine reuses nothing across it. Empty for nobody in particular without a salt.
#[must_use]
pub fn salt(tenant: &str, cache_salt: &str) -> Vec<u8> {
    if tenant.is_empty() && cache_salt.is_empty() {
        return Vec::new();
    }
    let mut fields = Fields::new("headrace prefix salt v1");
    fields.bytes("tenant", tenant.as_bytes());
    fields.bytes("cache_salt", cache_salt.as_bytes());
    fields.finish()[..16].to_vec()
}

/// The names of the full blocks of `ids`, in order. A rest shorter than a block has none.
#[must_use]
pub fn block_hashes(ids: &[u32], block_tokens: usize, seed: Seed) -> Vec<u64> {
    block_hashes_after(NO_PARENT, ids, block_tokens, seed)
}

/// The same for ids that follow the block named `parent`.
#[must_use]
pub fn block_hashes_after(parent: u64, ids: &[u32], block_tokens: usize, seed: Seed) -> Vec<u64> {
    if block_tokens == 0 {
        return Vec::new();
    }
    let mut parent = parent;
    let mut bytes = vec![0; 16 + 4 * block_tokens];
    bytes[..8].copy_from_slice(&seed.0.to_le_bytes());
    ids.chunks_exact(block_tokens)
        .map(|block| {
            bytes[8..16].copy_from_slice(&parent.to_le_bytes());
            for (place, id) in bytes[16..].chunks_exact_mut(4).zip(block) {
                place.copy_from_slice(&id.to_le_bytes());
            }
            // 0 is taken: it names no block.
            parent = xxh3_64(&bytes).max(1);
            parent
        })
        .collect()
}

/// What an answer depends on beside the request.
#[derive(Clone, Copy, Debug)]
pub struct Scope<'a> {
    /// Which tenant's it is; one tenant never gets another's.
    pub tenant: &'a str,
    /// The variant's name.
    pub model: &'a str,
    /// The weights and how they are run: a digest and a quantisation.
    pub model_version: &'a str,
    /// The tokenizer's digest.
    pub tokenizer: &'a str,
    /// The chat template's digest.
    pub template: &'a str,
    /// All ids by which the model says that it is done.
    pub eos_ids: &'a [u32],
}

/// The name of a request's answer in the response cache. `prompts` are the ids of each of its prompts and `max_tokens`
/// what was resolved for each, so a default written out is the same as one left out, and messages that render to the same
/// ids are the same question. How the answer is to be sent (stream, usage) is not in it.
#[must_use]
pub fn answer_key(scope: &Scope<'_>, prompts: &[(&[u32], u32)], request: &Request) -> [u8; 32] {
    let mut fields = Fields::new("headrace answer v1");
    fields.bytes("tenant", scope.tenant.as_bytes());
    fields.bytes("model", scope.model.as_bytes());
    fields.bytes("model_version", scope.model_version.as_bytes());
    fields.bytes("tokenizer", scope.tokenizer.as_bytes());
    fields.bytes("template", scope.template.as_bytes());
    fields.ids("eos_ids", scope.eos_ids);
    fields.bytes("lora", request.lora.as_deref().unwrap_or_default().as_bytes());
    fields.bytes(
        "cache_salt",
        request.cache_salt.as_deref().unwrap_or_default().as_bytes(),
    );
    fields.list("prompts", prompts.len());
    for (ids, max_tokens) in prompts {
        fields.ids("ids", ids);
        fields.number("max_tokens", u64::from(*max_tokens));
    }
    sampling_fields(&mut fields, request);
    stopping_fields(&mut fields, request);
    guided_fields(&mut fields, request.guided.as_ref());
    tool_fields(&mut fields, request);
    fields.number("logprobs", request.logprobs.map_or(0, |top| 1 + u64::from(top)));
    fields.number("echo", u64::from(request.echo));
    fields.finish()
}

fn sampling_fields(fields: &mut Fields, request: &Request) {
    let sampling = &request.sampling;
    fields.real("temperature", sampling.temperature);
    fields.number("top_k", u64::from(sampling.top_k));
    fields.real("top_p", sampling.top_p);
    fields.real("min_p", sampling.min_p);
    fields.real("repetition_penalty", sampling.repetition_penalty);
    fields.real("frequency_penalty", sampling.frequency_penalty);
    fields.real("presence_penalty", sampling.presence_penalty);
    fields.list("logit_bias", sampling.logit_bias.len());
    for (id, bias) in &sampling.logit_bias {
        fields.number("id", u64::from(*id));
        fields.real("bias", *bias);
    }
    fields.number("seeded", u64::from(sampling.seed.is_some()));
    fields.number("seed", sampling.seed.unwrap_or(0));
    fields.number("n", u64::from(sampling.n));
}

fn stopping_fields(fields: &mut Fields, request: &Request) {
    let stopping = &request.stopping;
    fields.number("min_tokens", u64::from(stopping.min_tokens));
    fields.number("ignore_eos", u64::from(stopping.ignore_eos));
    fields.texts("stop", &stopping.stop);
    fields.ids("stop_ids", &stopping.stop_ids);
    fields.number("include_stop", u64::from(stopping.include_stop));
}

fn guided_fields(fields: &mut Fields, guided: Option<&Guided>) {
    match guided {
        None => fields.bytes("guided", b""),
        Some(Guided::JsonSchema(schema)) => fields.bytes("json_schema", schema.as_bytes()),
        Some(Guided::JsonObject) => fields.bytes("json_object", b""),
        Some(Guided::Regex(pattern)) => fields.bytes("regex", pattern.as_bytes()),
        Some(Guided::Grammar(grammar)) => fields.bytes("grammar", grammar.as_bytes()),
        Some(Guided::Choice(texts)) => fields.texts("choice", texts),
    }
}

/// Tools are in the prompt too, if the template shows them; they also say how an answer is read.
fn tool_fields(fields: &mut Fields, request: &Request) {
    let choice = match &request.tool_choice {
        ToolChoice::Auto => "auto",
        ToolChoice::None => "none",
        ToolChoice::Required => "required",
        ToolChoice::Named(name) => name,
    };
    fields.bytes("tool_choice", choice.as_bytes());
    fields.number("named_tool", matches!(request.tool_choice, ToolChoice::Named(_)).into());
    fields.number("only_one_call", request.only_one_call.into());
    for prompt in &request.prompts {
        if let Prompt::Chat(chat) = prompt {
            let tools: Vec<String> = chat.tools.iter().map(ToString::to_string).collect();
            fields.texts("tools", &tools);
        }
    }
}

/// A digest of tagged fields.
struct Fields(Sha256);

impl Fields {
    fn new(purpose: &str) -> Self {
        let mut fields = Self(Sha256::new());
        fields.bytes("purpose", purpose.as_bytes());
        fields
    }

    fn tag(&mut self, tag: &str, len: usize) {
        self.0.update((tag.len() as u64).to_le_bytes());
        self.0.update(tag);
        self.0.update((len as u64).to_le_bytes());
    }

    fn bytes(&mut self, tag: &str, bytes: &[u8]) {
        self.tag(tag, bytes.len());
        self.0.update(bytes);
    }

    fn number(&mut self, tag: &str, number: u64) {
        self.bytes(tag, &number.to_le_bytes());
    }

    /// By its bits, with one zero: −0.0 asks for the same as 0.
    fn real(&mut self, tag: &str, real: f32) {
        self.bytes(tag, &(real + 0.0).to_bits().to_le_bytes());
    }

    /// The head of a list whose items follow as fields.
    fn list(&mut self, tag: &str, len: usize) {
        self.tag(tag, len);
    }

    fn texts(&mut self, tag: &str, texts: &[String]) {
        self.list(tag, texts.len());
        for text in texts {
            self.bytes("text", text.as_bytes());
        }
    }

    fn ids(&mut self, tag: &str, ids: &[u32]) {
        self.list(tag, ids.len());
        let mut bytes = Vec::with_capacity(4 * ids.len());
        for id in ids {
            bytes.extend_from_slice(&id.to_le_bytes());
        }
        self.0.update(bytes);
    }

    fn finish(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::openai::{chat, completions};
    use crate::request::Limits;

    const IDS: [u32; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];

    fn seed() -> Seed {
        Seed::new("toy", "", b"")
    }

    #[test]
    fn only_full_blocks_have_names() {
        assert_eq!(block_hashes(&IDS, 4, seed()).len(), 2);
        assert_eq!(block_hashes(&IDS[..6], 4, seed()), block_hashes(&IDS[..7], 4, seed()));
        assert!(block_hashes(&IDS[..3], 4, seed()).is_empty());
        assert!(block_hashes(&IDS, 0, seed()).is_empty());
    }

    #[test]
    fn a_block_is_named_by_all_before_it() {
        let after_one = block_hashes(&[1, 2, 3, 4, 5, 6, 7, 8], 4, seed());
        let after_other = block_hashes(&[9, 9, 9, 9, 5, 6, 7, 8], 4, seed());
        assert_ne!(after_one[1], after_other[1]);
        assert_ne!(after_one[0], block_hashes(&[5, 6, 7, 8], 4, seed())[0]);
    }

    #[test]
    fn model_adapter_and_salt_do_not_run_together() {
        let seeds = [
            Seed::new("toy", "", b""),
            Seed::new("toyX", "", b""),
            Seed::new("toy", "X", b""),
            Seed::new("toy", "", b"X"),
            Seed::new("", "toy", b"X"),
        ];
        let mut names: Vec<u64> = seeds.iter().map(|seed| block_hashes(&IDS, 4, *seed)[0]).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), seeds.len());
    }

    #[test]
    fn no_two_tenants_or_salts_share_a_name() {
        let salts = [
            ("", ""),
            ("a", ""),
            ("b", ""),
            ("", "a"),
            ("a", "b"),
            ("ab", ""),
            ("b", "a"),
        ];
        let name = |&(tenant, cache_salt): &(&str, &str)| {
            block_hashes(&IDS, 4, Seed::new("toy", "", &salt(tenant, cache_salt)))[0]
        };
        let mut names: Vec<u64> = salts.iter().map(name).collect();
        assert_eq!(names[0], block_hashes(&IDS, 4, seed())[0]);
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), salts.len());
    }

    /// Workers and routers of different builds must agree, so the names may never change unnoticed.
    #[test]
    fn names_are_stable() {
        let names = block_hashes(&[1, 2, 3, 4, 5, 6, 7, 8], 4, Seed::new("toy", "", b"salt"));
        assert_eq!(names, [7_072_019_305_774_817_769, 17_347_694_303_869_173_021]);
    }

    proptest! {
        #[test]
        fn a_chain_can_be_continued(
            ids in proptest::collection::vec(any::<u32>(), 0..64),
            block in 1_usize..9,
            cut in 0_usize..8,
        ) {
            let whole = block_hashes(&ids, block, seed());
            prop_assert_eq!(whole.len(), ids.len() / block);
            let cut = cut.min(whole.len());
            let parent = if cut == 0 { NO_PARENT } else { whole[cut - 1] };
            let rest = block_hashes_after(parent, &ids[cut * block..], block, seed());
            prop_assert_eq!(&whole[cut..], &rest[..]);
            prop_assert!(!whole.contains(&NO_PARENT));
        }
    }

    const SCOPE: Scope<'_> = Scope {
        tenant: "t1",
        model: "toy",
        model_version: "weights",
        tokenizer: "tokenizer",
        template: "template",
        eos_ids: &[900, 901],
    };

    fn chat_key(body: &str) -> [u8; 32] {
        chat_key_in(&SCOPE, body)
    }

    /// The key of a chat whose template writes roles and contents one after another, byte for id.
    fn chat_key_in(scope: &Scope<'_>, body: &str) -> [u8; 32] {
        let limits = Limits::new(1000, 4096);
        let request = chat::parse(body.as_bytes()).expect(body).validate(&limits).expect(body);
        let Prompt::Chat(prompt) = &request.prompts[0] else {
            unreachable!("a chat has a chat prompt")
        };
        let ids: Vec<u32> = format!("{:?}", prompt.messages).bytes().map(u32::from).collect();
        let max_tokens = request
            .resolve_max_tokens(ids.len(), limits.context_tokens)
            .expect(body);
        answer_key(scope, &[(&ids, max_tokens)], &request)
    }

    fn body(more: &str) -> String {
        format!(
            r#"{{"model":"toy","messages":[{{"role":"user","content":"hi"}}],"temperature":0,"max_tokens":9{more}}}"#
        )
    }

    #[test]
    fn whatever_can_change_the_answer_changes_its_name() {
        let mut bodies = vec![body("")];
        for more in [
            r#""max_tokens":10"#,
            r#""temperature":0.1"#,
            r#""seed":0"#,
            r#""seed":1"#,
            r#""stop":["ab","c"]"#,
            r#""stop":["a","bc"]"#,
            r#""stop":["abc"]"#,
            r#""stop_token_ids":[5]"#,
            r#""include_stop_str_in_output":true"#,
            r#""logit_bias":{"5":1}"#,
            r#""logit_bias":{"5":2}"#,
            r#""logit_bias":{"51":2}"#,
            r#""tools":[{"type":"function","function":{"name":"ab"}},{"type":"function","function":{"name":"c"}}]"#,
            r#""tools":[{"type":"function","function":{"name":"a"}},{"type":"function","function":{"name":"bc"}}]"#,
            r#""tools":[{"type":"function","function":{"name":"a"}}],"tool_choice":"none""#,
            r#""tools":[{"type":"function","function":{"name":"a"}}]"#,
            r#""response_format":{"type":"json_object"}"#,
            r#""response_format":{"type":"json_schema","json_schema":{"schema":{"type":"object"}}}"#,
            r#""response_format":{"type":"json_schema","json_schema":{"schema":{"type":"array"}}}"#,
            r#""guided_regex":"a""#,
            r#""guided_grammar":"a""#,
            r#""guided_choice":["a"]"#,
            r#""guided_choice":["a","b"]"#,
            r#""guided_choice":["ab"]"#,
            r#""logprobs":true"#,
            r#""logprobs":true,"top_logprobs":1"#,
            r#""n":2"#,
            r#""top_p":0.5"#,
            r#""top_k":5"#,
            r#""min_p":0.5"#,
            r#""min_tokens":2"#,
            r#""ignore_eos":true"#,
            r#""repetition_penalty":1.1"#,
            r#""presence_penalty":1"#,
            r#""frequency_penalty":1"#,
            r#""lora":"X""#,
            r#""cache_salt":"X""#,
            r#""messages":[{"role":"user","content":"ho"}]"#,
            r#""messages":[{"role":"system","content":"hi"}]"#,
        ] {
            // Of a key written twice the last holds.
            bodies.push(body(&format!(",{more}")));
        }
        let mut keys: Vec<[u8; 32]> = bodies.iter().map(|body| chat_key(body)).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), bodies.len());
    }

    #[test]
    fn how_it_is_asked_and_sent_changes_nothing() {
        let key = chat_key(&body(""));
        for same in [
            r#" { "temperature": 0.0, "max_tokens": 9, "messages": [{"content":"hi","role":"user"}], "model":"toy" } "#
                .to_owned(),
            body(r#","n":1"#),
            body(r#","stream":true"#),
            body(r#","stream":true,"stream_options":{"include_usage":true}"#),
            body(r#","top_p":1,"stop":[],"user":"x","unknown":[1],"seed":null"#),
            body(r#","response_format":{"type":"text"}"#),
            body(r#","max_completion_tokens":9"#),
            body(r#","deadline_ms":5000"#),
            body(r#","temperature":-0.0"#),
        ] {
            assert_eq!(chat_key(&same), key, "{same}");
        }
    }

    #[test]
    fn nobody_is_answered_out_of_scope() {
        let key = chat_key(&body(""));
        for other in [
            Scope { tenant: "t2", ..SCOPE },
            Scope { model: "toys", ..SCOPE },
            Scope {
                model_version: "other",
                ..SCOPE
            },
            Scope {
                template: "other",
                ..SCOPE
            },
            Scope {
                tokenizer: "other",
                ..SCOPE
            },
            Scope {
                eos_ids: &[900],
                ..SCOPE
            },
            Scope {
                tenant: "t1w",
                model_version: "eights",
                ..SCOPE
            },
        ] {
            assert_ne!(chat_key_in(&other, &body("")), key);
        }
    }

    #[test]
    fn several_prompts_do_not_run_together() {
        let limits = Limits::new(1000, 64);
        let draft = completions::parse(br#"{"model":"toy","prompt":["a","b"],"max_tokens":1}"#).expect("parses");
        let request = draft.validate(&limits).expect("valid");
        let key = |prompts: &[(&[u32], u32)]| answer_key(&SCOPE, prompts, &request);
        assert_ne!(key(&[(&[1, 2], 9), (&[3], 9)]), key(&[(&[1], 9), (&[2, 3], 9)]));
        assert_ne!(key(&[(&[1, 2, 3], 9)]), key(&[(&[1, 2], 9), (&[3], 9)]));
    }
}
