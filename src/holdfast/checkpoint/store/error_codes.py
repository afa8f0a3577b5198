"""Error codes of S3, Google Cloud Storage and Azure: the kind of each and advice; pure."""

from __future__ import annotations

from enum import Enum


class ErrorKind(Enum):
    """Kinds of client errors, by what the caller can do."""

    ABSENT = "the object does not exist"
    NO_BUCKET = "the bucket does not exist"
    TAKEN = "the name is in use, or another writer is writing it"
    PAST_END = "the object ends before the range begins"
    DENIED = "the store rejects the credentials, or they do not allow this"
    CLOCK = "the clock of this machine is wrong"
    MISCONFIGURED = "URL, settings or the bucket's configuration are wrong"
    FULL = "a quota or the store is full"
    PASSING = "the same request may succeed soon"
    LASTING = "the same request would fail again"
    NOT_OFFERED = "the server does not have this feature"
    NAME = "objects cannot have this name"


RENEW = (
    "The store rejected the credentials, or they do not allow this, even after reading them again. If they "
    "have expired, renew them: the next try uses the new ones."
)
REGION = "The bucket is in another region, or at another endpoint."
TLS = "The server expects https: write `https://` in `endpoint_url`, or use its port for http."
NOT_TLS = (
    "The server does not speak TLS at this port: write `http://` in `endpoint_url`, or use another port."
)
NOT_TRUSTED = (
    "The certificate of the server is not accepted: it is expired, for another name or of an unknown "
    "authority. Add the authority to this machine's certificates (SSL_CERT_FILE), and check the clock and "
    "`endpoint_url`."
)
CLOCK = (
    "The clock of this machine is wrong: stores refuse requests that are more than 15 minutes off. Set it, "
    "for example with `timedatectl set-ntp true` or `chronyc makestep`. The credentials may be right."
)
_NOT_ALLOWED = (
    "The credentials are known to the store, and may not do this. Holdfast reads, writes, lists and deletes "
    "objects: have that allowed by the policies of the bucket, the user and the network."
)
_UNKNOWN_KEY = (
    "The store does not accept these credentials. Check key, secret and account, and that they belong to "
    "this store. After they have been corrected, the next try uses the new ones."
)
_ACCOUNT = "The store has disabled the account, or it has no valid billing. Its owner has to clear that up."
_ENCRYPTION = (
    "The encryption key of the bucket is missing, disabled or not allowed. Correct the key, or the options "
    "`sse` and `sse_kms_key_id` of the URL."
)
_LOCKED = (
    "A retention policy, legal hold, lease or archive tier protects the object. Holdfast deletes and "
    "replaces objects below its prefix: exclude that prefix from the rule."
)
_ADDRESS = "The store expects another address. Check the bucket, and `endpoint_url` and `region` in the URL."
_PAYER = (
    "The bucket bills the requester: append `requester_pays=yes` to the URL, or name a project that pays."
)
_SIZE = "The object or part is larger or smaller than the store allows. Set `part_bytes` in the URL."
REQUEST = (
    "The store does not accept requests of this form. If it is not S3, Google Cloud Storage or Azure itself, "
    "check that it is compatible, and the options of the URL."
)
FULL = (
    "A quota is used up, or the store is full. Raise the quota, delete objects, or keep fewer checkpoints: "
    "the next try uses the new space."
)
_CODES: dict[tuple[ErrorKind, str], str] = {
    # Some mean bytes that were damaged or cut off on the way, an upload in parts that the store has
    # forgotten, or an object that was replaced or deleted meanwhile.
    (ErrorKind.PASSING, ""): """
        InternalError ServiceUnavailable SlowDown RequestTimeout OperationAborted ServerBusy OperationTimedOut
        TooManyRequests Busy ServerTimeout Throttling ThrottlingException RequestLimitExceeded
        BandwidthLimitExceeded SnapshotOperationRateExceeded ReducePriority XMinioServerNotInitialized
        XMinioBackendDown CannotVerifyCopySource ConnectionClosedByRequester ResponseInterrupted
        TemporaryRedirect Redirect ResumeIncomplete PendingCopyOperation ContainerBeingDeleted
        AccountBeingCreated SystemInUse KMS.ThrottlingException IncompleteBody BadDigest Md5Mismatch
        InvalidDigest InvalidMd5 CrcMismatch Crc64Mismatch XAmzContentSHA256Mismatch
        XAmzContentChecksumMismatch NoSuchUpload InvalidPart InvalidPartOrder InvalidBlockList
        InvalidBlobOrBlock NotModified BlobOverwritten SourceConditionNotMet CopyIdMismatch
        NoPendingCopyOperation
    """,
    (ErrorKind.TAKEN, ""): """
        ConditionalRequestConflict PreconditionFailed BlobAlreadyExists ConditionNotMet ResourceAlreadyExists
        TargetConditionNotMet AppendPositionConditionNotMet UnauthorizedBlobOverwrite
        MaxBlobSizeConditionNotMet SequenceNumberConditionNotMet
    """,
    (ErrorKind.PAST_END, ""): "InvalidRange",
    (ErrorKind.ABSENT, ""): "NoSuchKey NoSuchVersion BlobNotFound ResourceNotFound",
    (ErrorKind.NO_BUCKET, ""): """
        NoSuchBucket ContainerNotFound NoSuchAccessPoint NoSuchMultiRegionAccessPoint EndpointNotFound
        AccountNotFound
    """,
    (ErrorKind.CLOCK, CLOCK): "RequestTimeTooSkewed RequestInTheFuture RequestExpired",
    (ErrorKind.FULL, FULL): """
        QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded StorageFull InsufficientStorage
        StorageQuotaExceeded AccountQuotaExceeded SnapshotCountExceeded StorageCapExceeded
        TransactionCapExceeded DownloadCapExceeded BlockCountExceedsLimit TooManyObjects
        XMinioStorageQuotaExceeded ServiceQuotaExceeded
    """,
    (ErrorKind.DENIED, RENEW): """
        ExpiredToken InvalidToken TokenRefreshRequired InvalidSessionException ExpiredTokenException
        AuthenticationRequired
    """,
    (ErrorKind.DENIED, _UNKNOWN_KEY): """
        InvalidAccessKeyId SignatureDoesNotMatch InvalidSignature InvalidSecurity AuthenticationFailed
        InvalidAuthenticationInfo NoAuthenticationInformation MissingAuthenticationToken NotSignedUp
    """,
    (ErrorKind.DENIED, _NOT_ALLOWED): """
        AccessDenied UnauthorizedAccess UnauthorizedAccessError UnexpectedIPError AuthorizationFailure
        AuthorizationPermissionMismatch AuthorizationProtocolMismatch AuthorizationResourceTypeMismatch
        AuthorizationServiceMismatch AuthorizationSourceIPMismatch InsufficientAccountPermissions
        PublicAccessNotPermitted UserProjectAccessDenied Forbidden
    """,
    (ErrorKind.DENIED, _ACCOUNT): """
        AccountProblem AllAccessDisabled AccountIsDisabled ContainerDisabled UserProjectAccountProblem
        BillingDisabled AccountProtectedFromDeletion
    """,
    (ErrorKind.DENIED, _LOCKED): """
        RetentionPolicyNotMet ObjectUnderActiveHold BlobImmutableDueToLegalHold BlobArchived
        BlobImmutableDueToPolicy BlobBeingRehydrated InvalidObjectState LeaseIdMissing LeaseAlreadyPresent
        LeaseAlreadyBroken LeaseLost LeaseIdMismatchWithBlobOperation LeaseIdMismatchWithContainerOperation
        LeaseIdMismatchWithLeaseOperation LeaseIsBreakingAndCannotBeAcquired LeaseIsBreakingAndCannotBeChanged
        LeaseIsBrokenAndCannotBeRenewed LeaseNotPresentWithBlobOperation SnapshotsPresent
        LeaseNotPresentWithContainerOperation LeaseNotPresentWithLeaseOperation
    """,
    (ErrorKind.MISCONFIGURED, REGION): """
        AuthorizationHeaderMalformed PermanentRedirect PermanentRedirectControlError
        IllegalLocationConstraintException InvalidLocationConstraint InvalidRegion IncorrectEndpoint
        IncorrectRegion
    """,
    (ErrorKind.MISCONFIGURED, _ENCRYPTION): """
        KMS.DisabledException KMS.InvalidKeyUsageException KMS.KMSInvalidStateException KMS.NotFoundException
        InvalidEncryptionAlgorithmError CloudKmsBadKey CloudKmsCannotChangeKeyName
        CloudKmsDecryptionKeyNotFound CloudKmsDisabledKey CloudKmsEncryptionKeyNotFound
        CloudKmsKeyLocationNotAllowed CloudKmsKeyAccessDenied CustomerEncryptionAlgorithmIsInvalid
        CustomerEncryptionKeyFormatIsInvalid CustomerEncryptionKeyIsIncorrect
        CustomerEncryptionKeySha256IsInvalid ResourceIsEncryptedWithCustomerEncryptionKey
        KeyVaultEncryptionKeyNotFound ResourceNotEncryptedWithCustomerEncryptionKey
        KeyVaultAccessTokenCannotBeAcquired KeyVaultVaultNotFound BlobUsesCustomerSpecifiedEncryption
    """,
    (ErrorKind.MISCONFIGURED, _ADDRESS): """
        InvalidAddressingHeader InvalidHostHeader InvalidBucketName InvalidBucketState InvalidAccessPoint
        InvalidAccessPointAliasError InvalidBucketOwnerAWSAccountID InvalidResourceName InvalidUri
        RequestUrlFailedToParse
    """,
    (ErrorKind.MISCONFIGURED, _PAYER): """
        InvalidPayer UserProjectMissing UserProjectInconsistent UserProjectInvalid
    """,
    (ErrorKind.MISCONFIGURED, _SIZE): "EntityTooLarge EntityTooSmall RequestBodyTooLarge BlockListTooLong",
    (ErrorKind.NAME, ""): "KeyTooLongError KeyTooLong InvalidURI",
    (ErrorKind.NOT_OFFERED, ""): "NotImplemented MethodNotAllowed UnsupportedHttpVerb",
    # With statuses of conflicts between writers, which they are not.
    (ErrorKind.MISCONFIGURED, REQUEST): """
        BlobOperationNotSupported FeatureVersionMismatch InvalidBlobType InvalidHttpVerb InvalidOperation
        ResourceTypeMismatch
    """,
}

BY_CODE = {code: found for found, codes in _CODES.items() for code in codes.split()}
"""Kind and advice of the codes whose status does not tell enough."""
