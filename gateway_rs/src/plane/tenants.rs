//! Who asks: tenants and their keys, from the file that `headrace tenants` writes. It may change while the router serves.
//!
//! Keys are long and random, so a plain SHA-256 of each is enough: what the file holds cannot be used to ask. What cannot be
//! read is told of once and leaves the former in force. Without a file, everybody is one tenant without a name that may do
//! everything.
//!
//! What this leaves to others: limits of what is spent, weights and queues (the scheduler's, by the tenant's name).

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::RwLock;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::{
    files::{mark, Mark, LOOK_EVERY},
    log, unix_s,
};
use crate::{
    error::{ApiError, ErrorCode},
    request::Class,
};

/// The form of the file that this router understands.
const VERSION: u32 = 1;

/// One of those who ask.
#[derive(Debug, Default, PartialEq)]
pub struct Tenant {
    /// Empty: everybody, where no tenants are told apart.
    pub name: String,
    /// Its KV may be reused by others who share, and theirs by it.
    shares_prefixes: bool,
    /// Empty: all.
    models: Vec<String>,
    /// Empty: all.
    classes: Vec<Class>,
    /// The least agreement with a model's best variant that it accepts of another one; from 0 to 1.
    quality_floor: f32,
    /// What it spends is limited: each of its requests is asked for at the scheduler, who has the books.
    pub limited: bool,
    /// May see everybody's usage.
    pub admin: bool,
}

impl Tenant {
    /// Whether it may know of a model.
    pub fn sees(&self, model: &str) -> bool {
        self.models.is_empty() || self.models.iter().any(|known| known == model)
    }

    /// The least agreement with the best variant that must be expected, or measured, where a smaller one answers.
    pub fn quality_floor(&self) -> f32 {
        self.quality_floor
    }

    /// Within which its KV is reused: its own name, or for all who share nobody's.
    pub fn prefix_scope(&self) -> &str {
        match self.shares_prefixes {
            true => "",
            false => &self.name,
        }
    }

    /// Errors: MODEL_NOT_FOUND, as for one that isn't there; PERMISSION_DENIED for a class.
    pub fn may(&self, model: &str, class: Class) -> Result<(), ApiError> {
        if !self.sees(model) {
            return Err(ApiError::model_not_found(model));
        }
        if !self.classes.is_empty() && !self.classes.contains(&class) {
            let allowed: Vec<_> = self.classes.iter().map(|class| class.name()).collect();
            let message = format!(
                "requests of class {} are not open to this key (its classes: {})",
                class.name(),
                allowed.join(", ")
            );
            return Err(ApiError::new(ErrorCode::PermissionDenied, message).with_param("class"));
        }
        Ok(())
    }
}

/// Those who may ask now.
#[derive(Debug)]
pub struct Tenants {
    file: PathBuf,
    /// None: everybody.
    known: Option<RwLock<Known>>,
    everybody: Arc<Tenant>,
}

#[derive(Debug, Default)]
struct Known {
    mark: Mark,
    by_key: HashMap<[u8; 32], Holder>,
    by_name: HashMap<String, Arc<Tenant>>,
}

#[derive(Debug)]
struct Holder {
    tenant: Arc<Tenant>,
    /// Unix time after which the key is of no use.
    expires_s: u64,
}

impl Tenants {
    /// An empty path: everybody. The error is for people: which setting, and why.
    pub fn load(file: &Path) -> Result<Self, String> {
        let known = match file.as_os_str().is_empty() {
            true => None,
            false => Some(RwLock::new(read(file).map_err(|why| format!("tenants.file: {why}"))?)),
        };
        Ok(Self {
            file: file.to_owned(),
            known,
            everybody: Arc::default(),
        })
    }

    /// Whose key it is. `authorization` is the header of that name, or empty. Errors: UNAUTHENTICATED.
    pub fn identify(&self, authorization: &str) -> Result<Arc<Tenant>, ApiError> {
        let Some(known) = &self.known else {
            return Ok(self.everybody.clone());
        };
        let refused = |message: &str| Err(ApiError::new(ErrorCode::Unauthenticated, message));
        let (scheme, key) = authorization.split_once(' ').unwrap_or_default();
        let key = key.trim();
        if !scheme.eq_ignore_ascii_case("bearer") || key.is_empty() {
            return refused("an API key is needed: Authorization: Bearer KEY");
        }
        let digest: [u8; 32] = Sha256::digest(key.as_bytes()).into();
        match known.read().by_key.get(&digest) {
            Some(holder) if unix_s() < holder.expires_s => Ok(holder.tenant.clone()),
            Some(_) => refused("the API key has expired"),
            None => refused("the API key is not known"),
        }
    }

    /// The tenant of that name, for work that was taken in with its key before. Errors: UNAUTHENTICATED when it is no more.
    pub fn named(&self, name: &str) -> Result<Arc<Tenant>, ApiError> {
        match &self.known {
            None if name.is_empty() => Ok(self.everybody.clone()),
            None => Err(name),
            Some(known) => known.read().by_name.get(name).cloned().ok_or(name),
        }
        .map_err(|_| ApiError::new(ErrorCode::Unauthenticated, "the tenant is not known any more"))
    }

    /// Looks at the file for as long as the process serves.
    pub async fn watch(self: Arc<Self>) {
        if self.known.is_none() {
            return;
        }
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let tenants = self.clone();
            // A file may be slow to answer; streams must not wait for it.
            if tokio::task::spawn_blocking(move || tenants.refresh()).await.is_err() {
                log::warn("looking at the tenants' file failed");
            }
        }
    }

    fn refresh(&self) {
        let Some(known) = &self.known else { return };
        let mark = mark(&self.file);
        if known.read().mark == mark {
            return;
        }
        match read(&self.file) {
            Ok(fresh) => {
                log::info("the tenants' file has changed and is in force");
                *known.write() = fresh;
            }
            Err(why) => {
                log::warn(&format!("the former tenants stay in force: {why}"));
                // Told once for each state of the file.
                known.write().mark = mark;
            }
        }
    }
}

#[derive(Deserialize)]
struct File {
    version: u32,
    #[serde(default)]
    tenants: BTreeMap<String, Entry>,
}

/// Fields of later versions of `headrace tenants` are let be: what they mean is enforced elsewhere.
#[derive(Deserialize)]
struct Entry {
    keys: Vec<Key>,
    #[serde(default)]
    models: Vec<String>,
    #[serde(default)]
    classes: Vec<String>,
    #[serde(default)]
    shares_prefixes: bool,
    #[serde(default)]
    quality_floor: f32,
    /// By name; 0 = none. What they mean is the scheduler's.
    #[serde(default)]
    limits: BTreeMap<String, f64>,
    #[serde(default)]
    roles: Vec<String>,
}

#[derive(Deserialize)]
struct Key {
    sha256: String,
    #[serde(default)]
    expires_s: Option<u64>,
}

fn read(path: &Path) -> Result<Known, String> {
    // The mark first: what changes while it is read is read again.
    let mark = mark(path);
    let shown = path.display();
    let text = fs::read_to_string(path).map_err(|error| format!("cannot read {shown}: {error}"))?;
    let file: File = serde_json::from_str(&text).map_err(|error| format!("{shown}: {error}"))?;
    if file.version != VERSION {
        return Err(format!(
            "{shown} is of version {}, this router reads {VERSION}",
            file.version
        ));
    }
    let (mut by_key, mut by_name) = (HashMap::new(), HashMap::new());
    for (name, entry) in file.tenants {
        let classes = entry.classes.iter().map(|class| {
            Class::from_name(class).ok_or_else(|| format!("{shown}: tenant {name} has an unknown class {class}"))
        });
        let classes = classes.collect::<Result<Vec<_>, _>>()?;
        if !(0.0..=1.0).contains(&entry.quality_floor) {
            return Err(format!(
                "{shown}: tenant {name} has a quality floor that is not from 0 to 1"
            ));
        }
        let tenant = Arc::new(Tenant {
            shares_prefixes: entry.shares_prefixes,
            models: entry.models,
            quality_floor: entry.quality_floor,
            classes,
            limited: entry.limits.values().any(|limit| *limit > 0.0),
            admin: entry.roles.iter().any(|role| role == "admin"),
            name,
        });
        by_name.insert(tenant.name.clone(), tenant.clone());
        for key in entry.keys {
            let digest = digest(&key.sha256)
                .ok_or_else(|| format!("{shown}: tenant {} has a key without a SHA-256", tenant.name))?;
            let holder = Holder {
                tenant: tenant.clone(),
                expires_s: key.expires_s.unwrap_or(u64::MAX),
            };
            if let Some(other) = by_key.insert(digest, holder) {
                return Err(format!(
                    "{shown}: {} and {} have the same key",
                    other.tenant.name, tenant.name
                ));
            }
        }
    }
    Ok(Known { mark, by_key, by_name })
}

/// Of 64 hexadecimal digits.
fn digest(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (byte, place) in bytes.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(text.get(place..place + 2)?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn sha256(key: &str) -> String {
        Sha256::digest(key.as_bytes())
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    fn written(tenants: &serde_json::Value) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tenants.json");
        fs::write(&path, serde_json::json!({"version": 1, "tenants": tenants}).to_string()).unwrap();
        (folder, path)
    }

    #[test]
    fn everybody_may_ask_where_there_is_no_file() {
        let tenants = Tenants::load(Path::new("")).unwrap();
        let everybody = tenants.identify("").unwrap();
        assert_eq!((everybody.name.as_str(), everybody.prefix_scope()), ("", ""));
        everybody.may("any", Class::Batch).unwrap();
        assert_eq!(tenants.named("").unwrap(), everybody);
        assert!(tenants.named("acme").is_err());
    }

    #[test]
    fn a_key_is_one_tenants_and_nothing_else_is_a_key() {
        let (_folder, path) = written(&serde_json::json!({
            "acme": {"keys": [{"sha256": sha256("one")}, {"sha256": sha256("old"), "expires_s": 1}]},
            "both": {"keys": [{"sha256": sha256("two")}], "shares_prefixes": true, "later": {"of": 2}},
        }));
        let tenants = Tenants::load(&path).unwrap();
        assert_eq!(tenants.identify("Bearer one").unwrap().name, "acme");
        assert_eq!(tenants.identify("bearer  one ").unwrap().prefix_scope(), "acme");
        assert_eq!(tenants.identify("Bearer two").unwrap().prefix_scope(), "");
        assert_eq!(tenants.named("acme").unwrap().name, "acme");
        for gone in ["", "other", "one"] {
            assert_eq!(tenants.named(gone).unwrap_err().code, ErrorCode::Unauthenticated);
        }
        for header in [
            "",
            "Bearer",
            "Bearer ",
            "one",
            "Basic one",
            "Bearer three",
            "Bearer old",
        ] {
            let error = tenants.identify(header).unwrap_err();
            assert_eq!(error.code, ErrorCode::Unauthenticated, "{header}");
            assert!(!error.message.contains("three"), "a key is never repeated");
        }
        let digest = format!("Bearer {}", sha256("one"));
        assert!(
            tenants.identify(&digest).is_err(),
            "what the file holds can't be used to ask"
        );
    }

    #[test]
    fn models_and_classes_are_those_allowed() {
        let (_folder, path) = written(&serde_json::json!({
            "acme": {"keys": [{"sha256": sha256("one")}], "models": ["small"], "classes": ["standard", "batch"]},
        }));
        let tenant = Tenants::load(&path).unwrap().identify("Bearer one").unwrap();
        tenant.may("small", Class::Batch).unwrap();
        assert_eq!(
            tenant.may("large", Class::Batch).unwrap_err().code,
            ErrorCode::ModelNotFound
        );
        let error = tenant.may("small", Class::Interactive).unwrap_err();
        assert_eq!(error.code, ErrorCode::PermissionDenied);
        assert!(error.message.contains("standard, batch"), "{}", error.message);
    }

    #[test]
    fn what_cannot_be_read_leaves_the_former_in_force() {
        let (_folder, path) = written(&serde_json::json!({"acme": {"keys": [{"sha256": sha256("one")}]}}));
        let tenants = Tenants::load(&path).unwrap();
        for text in [
            "{",
            r#"{"version": 2}"#,
            r#"{"version": 1, "tenants": {"a": {"keys": [{"sha256": "00"}]}}}"#,
        ] {
            fs::write(&path, text).unwrap();
            tenants.refresh();
            assert_eq!(tenants.identify("Bearer one").unwrap().name, "acme", "{text}");
            assert!(Tenants::load(&path).unwrap_err().starts_with("tenants.file: "));
        }
        let fresh = serde_json::json!({"version": 1, "tenants": {"next": {"keys": [{"sha256": sha256("two")}]}}});
        fs::write(&path, fresh.to_string()).unwrap();
        tenants.refresh();
        assert!(tenants.identify("Bearer one").is_err());
        assert_eq!(tenants.identify("Bearer two").unwrap().name, "next");
    }
}
