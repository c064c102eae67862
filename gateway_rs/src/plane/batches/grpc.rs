//! `headrace.v1.BatchService` at the native door: who asks is identified, the rest is passed on.

use std::{pin::Pin, sync::Arc};

use futures_core::Stream;
use tokio::sync::{mpsc, OwnedSemaphorePermit};
use tokio_stream::{wrappers::ReceiverStream, StreamExt as _};
use tonic::{transport::Channel, Request, Response, Status, Streaming};

use super::{error_of, of, request};
use crate::{
    error::ApiError,
    plane::{
        grpc::{status, text},
        tenants::Tenant,
        Plane,
    },
    proto::{
        batch_service_client::BatchServiceClient,
        batch_service_server::{BatchService, BatchServiceServer},
        CancelBatchRequest, CancelBatchResponse, CreateBatchRequest, CreateBatchResponse, DeleteFileRequest,
        DeleteFileResponse, DownloadFileRequest, DownloadFileResponse, GetBatchRequest, GetBatchResponse,
        GetFileRequest, GetFileResponse, ListBatchesRequest, ListBatchesResponse, ListFilesRequest, ListFilesResponse,
        UploadFileRequest, UploadFileResponse,
    },
};

/// For the door's server.
pub fn service(plane: Arc<Plane>) -> BatchServiceServer<Door> {
    let limit = plane.config.max_body_bytes;
    BatchServiceServer::new(Door(plane)).max_decoding_message_size(limit)
}

/// The native door's part for files and batches.
pub struct Door(Arc<Plane>);

impl Door {
    fn way<T>(&self, request: &Request<T>) -> Result<(BatchServiceClient<Channel>, Arc<Tenant>), ApiError> {
        let tenant = self.0.tenants.identify(text(request.metadata(), "authorization"))?;
        Ok((of(&self.0)?.client(), tenant))
    }

    fn transfer(&self) -> Result<OwnedSemaphorePermit, Status> {
        of(&self.0)
            .and_then(|batches| batches.transfer())
            .map_err(|error| status(&error))
    }
}

/// A call whose question and answer are passed on as they are.
macro_rules! pass_on {
    ($door:ident, $asked:ident, $call:ident) => {{
        let (mut client, tenant) = $door.way(&$asked).map_err(|error| status(&error))?;
        let answered = client.$call(request(&tenant, $asked.into_inner())).await;
        let answer = answered.map_err(|failed| status(&error_of(&failed)))?;
        Ok(Response::new(answer.into_inner()))
    }};
}

#[tonic::async_trait]
impl BatchService for Door {
    type DownloadFileStream = Pin<Box<dyn Stream<Item = Result<DownloadFileResponse, Status>> + Send>>;

    async fn upload_file(
        &self,
        asked: Request<Streaming<UploadFileRequest>>,
    ) -> Result<Response<UploadFileResponse>, Status> {
        let (mut client, tenant) = self.way(&asked).map_err(|error| status(&error))?;
        let _transfer = self.transfer()?;
        let mut incoming = asked.into_inner();
        let (sender, receiver) = mpsc::channel(4);
        // A stream that breaks ends here without the word that it is complete, and then nothing is kept.
        let feeding = async move {
            while let Some(part) = incoming.message().await? {
                if sender.send(part).await.is_err() {
                    break;
                }
            }
            Ok::<(), Status>(())
        };
        let answering = client.upload_file(request(&tenant, ReceiverStream::new(receiver)));
        let (fed, answered) = tokio::join!(feeding, answering);
        fed?;
        let answer = answered.map_err(|failed| status(&error_of(&failed)))?;
        Ok(Response::new(answer.into_inner()))
    }

    async fn get_file(&self, asked: Request<GetFileRequest>) -> Result<Response<GetFileResponse>, Status> {
        pass_on!(self, asked, get_file)
    }

    async fn list_files(&self, asked: Request<ListFilesRequest>) -> Result<Response<ListFilesResponse>, Status> {
        pass_on!(self, asked, list_files)
    }

    async fn delete_file(&self, asked: Request<DeleteFileRequest>) -> Result<Response<DeleteFileResponse>, Status> {
        pass_on!(self, asked, delete_file)
    }

    async fn download_file(
        &self,
        asked: Request<DownloadFileRequest>,
    ) -> Result<Response<Self::DownloadFileStream>, Status> {
        let (mut client, tenant) = self.way(&asked).map_err(|error| status(&error))?;
        let transfer = self.transfer()?;
        let answered = client.download_file(request(&tenant, asked.into_inner())).await;
        let parts = answered.map_err(|failed| status(&error_of(&failed)))?.into_inner();
        let told = parts.map(move |part| {
            let _ = &transfer;
            part.map_err(|failed| status(&error_of(&failed)))
        });
        Ok(Response::new(Box::pin(told)))
    }

    async fn create_batch(&self, asked: Request<CreateBatchRequest>) -> Result<Response<CreateBatchResponse>, Status> {
        pass_on!(self, asked, create_batch)
    }

    async fn get_batch(&self, asked: Request<GetBatchRequest>) -> Result<Response<GetBatchResponse>, Status> {
        pass_on!(self, asked, get_batch)
    }

    async fn list_batches(&self, asked: Request<ListBatchesRequest>) -> Result<Response<ListBatchesResponse>, Status> {
        pass_on!(self, asked, list_batches)
    }

    async fn cancel_batch(&self, asked: Request<CancelBatchRequest>) -> Result<Response<CancelBatchResponse>, Status> {
        pass_on!(self, asked, cancel_batch)
    }
}
