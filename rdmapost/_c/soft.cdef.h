/* The C side of the soft device; soft.c documents it. */

struct rp_soft_ops {
	int64_t (*send)(uint32_t number, char *records, size_t size,
			uint32_t count);
	int64_t (*recv)(uint32_t number, char *records, size_t size,
			uint32_t count);
	int64_t (*srq_recv)(uint32_t number, char *records, size_t size,
			    uint32_t count);
	int (*post_srq_ops)(struct ibv_srq *srq, struct ibv_ops_wr *op,
			    struct ibv_ops_wr **bad_op);
	int (*poll_cq)(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
	int (*req_notify_cq)(struct ibv_cq *cq, int solicited_only);
};

struct rp_soft_xrcd {
	struct ibv_xrcd xrcd;
	uint32_t handle;
};

struct rp_soft_cq_ex {
	struct ibv_cq_ex cq;
	...;
};

extern int rp_soft_interrupted;
struct ibv_context *rp_soft_open(const struct rp_soft_ops *ops);
void rp_soft_close(struct ibv_context *context);
int rp_soft_cq_ex_init(struct rp_soft_cq_ex *cq,
		       int (*fill)(struct ibv_cq *cq, int max,
				   struct ibv_wc *wc,
				   struct ibv_wc_tm_info *tm));
int rp_timer_open(void);
int rp_timer_set(int fd, int64_t ns);

#define RP_SOFT_MAX_SGE ...
extern "Python" int64_t soft_send(uint32_t, char *, size_t, uint32_t);
extern "Python" int64_t soft_recv(uint32_t, char *, size_t, uint32_t);
extern "Python" int64_t soft_srq_recv(uint32_t, char *, size_t, uint32_t);
extern "Python" int soft_post_srq_ops(struct ibv_srq *, struct ibv_ops_wr *,
				      struct ibv_ops_wr **);
extern "Python" int soft_poll_cq(struct ibv_cq *, int, struct ibv_wc *);
extern "Python" int soft_req_notify_cq(struct ibv_cq *, int);
extern "Python" int soft_fill_cq(struct ibv_cq *, int, struct ibv_wc *,
				 struct ibv_wc_tm_info *);
