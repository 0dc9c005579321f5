/* The same as soft_device.h, for cffi. */

struct verbs_context {
	...;
};

struct rp_soft_xrcd {
	struct ibv_xrcd xrcd;
	uint32_t handle;
};

struct rp_soft_cq_ex {
	struct ibv_cq_ex cq;
	...;
};

struct rp_soft_qp_ex {
	...;
};

struct ibv_context *rp_soft_context_init(struct verbs_context *whole);
void rp_soft_cq_ex_init(struct rp_soft_cq_ex *cq, uint64_t wc_flags);
struct ibv_qp *rp_soft_qp_ex_init(struct rp_soft_qp_ex *qp);

/* timerfd_create(2) */
#define CLOCK_MONOTONIC ...
#define TFD_CLOEXEC ...
#define TFD_NONBLOCK ...

int timerfd_create(int clock, int flags);
