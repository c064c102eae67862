//! `/v1/files` and `/v1/batches`: the body that makes a batch, and what is told of files and batches.

use serde_json::{json, Value};

use super::fields::{wrong_type, Fields};
use crate::{
    error::ApiError,
    proto::{Batch, BatchStatus, CreateBatchRequest, File},
};

/// What `POST /v1/batches` asks for. What its values may be is decided where batches are kept.
pub fn parse_create(body: &[u8]) -> Result<CreateBatchRequest, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let mut needed = |name: &str| {
        let text = fields.text(name)?.filter(|text| !text.is_empty());
        text.ok_or_else(|| ApiError::invalid(name, format!("'{name}' is needed")))
    };
    let (input_file_id, endpoint) = (needed("input_file_id")?, needed("endpoint")?);
    let completion_window = needed("completion_window")?;
    let metadata = fields.object("metadata")?.unwrap_or_default().into_iter();
    let metadata = metadata.map(|(name, value)| match value {
        Value::String(text) => Ok((name, text)),
        other => Err(wrong_type("metadata", "an object of strings", &other)),
    });
    Ok(CreateBatchRequest {
        input_file_id,
        endpoint,
        completion_window,
        metadata: metadata.collect::<Result<_, _>>()?,
        output_expires_after_s: match fields.object("output_expires_after")? {
            None => 0,
            Some(mut after) => {
                let anchor = after.swap_remove("anchor").unwrap_or_default();
                let seconds = after.swap_remove("seconds").unwrap_or_default().to_string();
                expires_after(anchor.as_str().unwrap_or_default(), &seconds, "output_expires_after")?
            }
        },
    })
}

/// Seconds after a file was made.
pub fn expires_after(anchor: &str, seconds: &str, param: &str) -> Result<u32, ApiError> {
    if anchor != "created_at" {
        return Err(ApiError::invalid(
            format!("{param}.anchor"),
            "the only anchor is 'created_at'",
        ));
    }
    match seconds.parse::<u32>() {
        Ok(seconds) if seconds > 0 => Ok(seconds),
        _ => Err(ApiError::invalid(
            format!("{param}.seconds"),
            "a number of seconds is needed",
        )),
    }
}

/// A file, as it is told of.
pub fn file_body(file: &File) -> Value {
    json!({
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_s,
        "expires_at": time(file.expires_s),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": null,
    })
}

/// That a file is no more.
pub fn deleted_body(id: &str) -> Value {
    json!({"id": id, "object": "file", "deleted": true})
}

/// A batch, as it is told of.
pub fn batch_body(batch: &Batch) -> Value {
    let counts = batch.request_counts.unwrap_or_default();
    let usage = batch.usage.unwrap_or_default();
    let errors: Vec<_> = batch
        .errors
        .iter()
        .map(|error| {
            json!({
                "code": error.code,
                "message": error.message,
                "line": (error.line > 0).then_some(error.line),
                "param": name(&error.param),
            })
        })
        .collect();
    json!({
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": (!errors.is_empty()).then(|| json!({"object": "list", "data": errors})),
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": status(batch.status()),
        "output_file_id": name(&batch.output_file_id),
        "error_file_id": name(&batch.error_file_id),
        "created_at": batch.created_s,
        "in_progress_at": time(batch.in_progress_s),
        "expires_at": time(batch.expires_s),
        "finalizing_at": time(batch.finalizing_s),
        "completed_at": time(batch.completed_s),
        "failed_at": time(batch.failed_s),
        "expired_at": time(batch.expired_s),
        "cancelling_at": time(batch.cancelling_s),
        "cancelled_at": time(batch.cancelled_s),
        "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
        "metadata": (!batch.metadata.is_empty()).then(|| json!(batch.metadata)),
    })
}

/// A page of either.
pub fn page_body(items: Vec<Value>, has_more: bool) -> Value {
    let id = |item: Option<&Value>| item.and_then(|item| item.get("id")).cloned();
    let (first, last) = (id(items.first()), id(items.last()));
    json!({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more})
}

fn status(status: BatchStatus) -> &'static str {
    match status {
        BatchStatus::Unspecified | BatchStatus::Validating => "validating",
        BatchStatus::Failed => "failed",
        BatchStatus::InProgress => "in_progress",
        BatchStatus::Finalizing => "finalizing",
        BatchStatus::Completed => "completed",
        BatchStatus::Expired => "expired",
        BatchStatus::Cancelling => "cancelling",
        BatchStatus::Cancelled => "cancelled",
    }
}

fn time(unix_s: i64) -> Option<i64> {
    (unix_s != 0).then_some(unix_s)
}

fn name(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::batch;

    #[test]
    fn a_batch_is_asked_for_with_all_that_it_needs() {
        let asked = parse_create(
            br#"{"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h", "other": 1,
                "metadata": {"a": "b"}, "output_expires_after": {"anchor": "created_at", "seconds": 3600}}"#,
        );
        let asked = asked.expect("a batch");
        assert_eq!(
            (asked.input_file_id.as_str(), asked.endpoint.as_str()),
            ("file-1", "/v1/completions")
        );
        assert_eq!(
            (asked.metadata["a"].as_str(), asked.output_expires_after_s),
            ("b", 3600)
        );
        for (body, param) in [
            (r#"{"endpoint": "x", "completion_window": "24h"}"#, "input_file_id"),
            (r#"{"input_file_id": "f", "completion_window": "24h"}"#, "endpoint"),
            (
                r#"{"input_file_id": "f", "endpoint": "", "completion_window": "24h"}"#,
                "endpoint",
            ),
            (
                r#"{"input_file_id": 7, "endpoint": "x", "completion_window": "24h"}"#,
                "input_file_id",
            ),
            (
                r#"{"input_file_id": "f", "endpoint": "x", "completion_window": "24h", "metadata": {"a": 1}}"#,
                "metadata",
            ),
            (
                r#"{"input_file_id": "f", "endpoint": "x", "completion_window": "24h",
                    "output_expires_after": {"anchor": "created_at", "seconds": -1}}"#,
                "output_expires_after.seconds",
            ),
            (
                r#"{"input_file_id": "f", "endpoint": "x", "completion_window": "24h", "output_expires_after": {}}"#,
                "output_expires_after.anchor",
            ),
        ] {
            let error = parse_create(body.as_bytes()).expect_err(body);
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
        }
    }

    #[test]
    fn what_did_not_happen_is_null() {
        let fresh = batch_body(&Batch {
            id: "batch-1".to_owned(),
            created_s: 5,
            ..Batch::default()
        });
        assert_eq!(
            (&fresh["status"], &fresh["created_at"]),
            (&json!("validating"), &json!(5))
        );
        for field in [
            "completed_at",
            "output_file_id",
            "error_file_id",
            "errors",
            "metadata",
            "cancelled_at",
        ] {
            assert!(fresh[field].is_null(), "{field}");
        }
        let failed = batch_body(&Batch {
            status: BatchStatus::Failed as i32,
            errors: vec![batch::LineError {
                code: "empty_file".to_owned(),
                ..batch::LineError::default()
            }],
            ..Batch::default()
        });
        assert_eq!(failed["status"], "failed");
        assert_eq!(failed["errors"]["data"][0]["code"], "empty_file");
        assert!(failed["errors"]["data"][0]["line"].is_null());
        let page = page_body(vec![json!({"id": "a"}), json!({"id": "b"})], true);
        assert_eq!(
            (&page["first_id"], &page["last_id"], &page["has_more"]),
            (&json!("a"), &json!("b"), &json!(true))
        );
        assert!(page_body(Vec::new(), false)["first_id"].is_null());
    }
}
