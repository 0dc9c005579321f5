/* The C side of the soft device; soft.c documents it. */

struct rp_soft_ops {
	int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *wr,
			 struct ibv_send_wr **bad_wr);
	int (*post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *wr,
			 struct ibv_recv_wr **bad_wr);
	int (*post_srq_recv)(struct ibv_srq *srq, struct ibv_recv_wr *wr,
			     struct ibv_recv_wr **bad_wr);
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

struct ibv_context *rp_soft_open(const struct rp_soft_ops *ops);
void rp_soft_close(struct ibv_context *context);
int rp_soft_cq_ex_init(struct rp_soft_cq_ex *cq,
		       int (*fill)(struct ibv_cq *cq, int max,
				   struct ibv_wc *wc,
				   struct ibv_wc_tm_info *tm));
int rp_timer_open(void);
int rp_timer_set(int fd, int64_t ns);

extern "Python" int soft_post_send(struct ibv_qp *, struct ibv_send_wr *,
				   struct ibv_send_wr **);
extern "Python" int soft_post_recv(struct ibv_qp *, struct ibv_recv_wr *,
				   struct ibv_recv_wr **);
extern "Python" int soft_post_srq_recv(struct ibv_srq *, struct ibv_recv_wr *,
				       struct ibv_recv_wr **);
extern "Python" int soft_post_srq_ops(struct ibv_srq *, struct ibv_ops_wr *,
				      struct ibv_ops_wr **);
extern "Python" int soft_poll_cq(struct ibv_cq *, int, struct ibv_wc *);
extern "Python" int soft_req_notify_cq(struct ibv_cq *, int);
extern "Python" int soft_fill_cq(struct ibv_cq *, int, struct ibv_wc *,
				 struct ibv_wc_tm_info *);
