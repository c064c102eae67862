//! "What was used?" Tenants hear of themselves, admins of everybody. The ledger is the scheduler's; here is who may ask.

use axum::extract::Query;
use serde::Deserialize;
use serde_json::{json, Map, Value};

use super::{tenants::Tenant, Plane};
use crate::{
    error::{ApiError, ErrorCode},
    proto::{UsageLine, UsageQuestion, UsageReport},
};

/// The query of `GET /v1/usage`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Asked {
    /// Names with commas between.
    by: Option<String>,
    tenant: Option<String>,
    /// Unix times.
    start_time: Option<f64>,
    end_time: Option<f64>,
}

/// Errors: INVALID_ARGUMENT, for people.
pub fn parse(uri: &http::Uri) -> Result<UsageQuestion, ApiError> {
    let Query(asked) = Query::<Asked>::try_from_uri(uri)
        .map_err(|error| ApiError::new(ErrorCode::InvalidArgument, format!("the query: {error}")))?;
    let by = asked.by.as_deref().unwrap_or("tenant,variant,day").split(',');
    Ok(UsageQuestion {
        by: by.filter(|each| !each.is_empty()).map(str::to_owned).collect(),
        tenant: asked.tenant,
        from_s: asked.start_time,
        to_s: asked.end_time,
    })
}

/// The answer. Errors: PERMISSION_DENIED for what is somebody else's; the scheduler's own; UNAVAILABLE.
pub async fn answer(plane: &Plane, tenant: &Tenant, mut question: UsageQuestion) -> Result<UsageReport, ApiError> {
    // Where nobody is told apart, everybody is.
    if !tenant.name.is_empty() && !tenant.admin {
        let own = question.tenant.get_or_insert_with(|| tenant.name.clone());
        if *own != tenant.name {
            let message = "this key may see its own tenant's usage only (an admin's sees all)";
            return Err(ApiError::new(ErrorCode::PermissionDenied, message).with_param("tenant"));
        }
    }
    plane.scheduler.usage(question).await
}

/// As JSON.
pub fn body(report: &UsageReport) -> String {
    let data: Vec<Value> = report.lines.iter().map(line).collect();
    let total = report.total.as_ref().map(line);
    json!({"object": "usage", "data": data, "total": total}).to_string()
}

fn line(line: &UsageLine) -> Value {
    let mut fields: Map<String, Value> = Map::new();
    let mut group: Vec<_> = line.group.iter().collect();
    group.sort();
    for (name, value) in group {
        fields.insert(name.clone(), value.as_str().into());
    }
    for (name, value) in [
        ("requests", line.requests),
        ("tokens", line.prompt_tokens + line.output_tokens),
        ("prompt_tokens", line.prompt_tokens),
        ("cached_prompt_tokens", line.cached_prompt_tokens),
        ("output_tokens", line.output_tokens),
        ("wasted_tokens", line.wasted_tokens),
        ("replayed_requests", line.replayed_requests),
        ("replayed_tokens", line.replayed_tokens),
    ] {
        fields.insert(name.to_owned(), value.into());
    }
    for (name, value) in [
        ("dollars", Some(line.dollars)),
        ("dollars_per_1k_tokens", line.dollars_per_1k_tokens),
        ("prefix_cache_saved_dollars", Some(line.prefix_cache_saved_dollars)),
        ("response_cache_saved_dollars", Some(line.response_cache_saved_dollars)),
        ("variants_saved_dollars", Some(line.variants_saved_dollars)),
        ("batch_saved_dollars", Some(line.batch_saved_dollars)),
        ("shadow_dollars", Some(line.shadow_dollars)),
        ("mean_ttft_s", line.mean_ttft_s),
    ] {
        fields.insert(name.to_owned(), value.into());
    }
    Value::Object(fields)
}
