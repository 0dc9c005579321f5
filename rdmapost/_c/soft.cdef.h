/* The C side of the soft device; soft.h documents it. */

struct rp_soft_xrcd {
	struct ibv_xrcd xrcd;
	uint32_t handle;
};

struct rp_soft_context {
	...;
};

struct rp_soft_cq_ex {
	struct ibv_cq_ex cq;
	...;
};

int rp_soft_context_init(struct rp_soft_context *soft);
struct ibv_context *rp_soft_context_of(struct rp_soft_context *soft);
int rp_soft_busy(void);
int rp_soft_cq_ex_init(struct rp_soft_cq_ex *cq);
int rp_timer_open(void);
int rp_timer_set(int fd, int64_t ns);

#define RP_SOFT_MAX_SGE ...
