/* The shim's own calls; shim.h documents them. */

int rp_load(const char *path, char *why, size_t size);
int rp_has_symbol(const char *name);
struct ibv_mr *rp_reg_mr(struct ibv_pd *pd, void *addr, size_t length,
			 unsigned int access);
struct ibv_cq *rp_create_cq(struct ibv_context *context, int cqe,
			    struct ibv_comp_channel *channel, int comp_vector);
struct ibv_cq *rp_create_cq_ex(struct ibv_context *context, int cqe,
			       struct ibv_comp_channel *channel,
			       int comp_vector);
int rp_get_async_event(struct ibv_context *context,
		       struct ibv_async_event *event);
int rp_query_port(struct ibv_context *context, uint8_t port_num,
		  struct ibv_port_attr *attr);
int rp_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);

int rp_poll_cq(struct ibv_cq *cq, struct ibv_wc *wc, int max, int min,
	       int64_t spin_ns);
int rp_poll_cq_ex(struct ibv_cq_ex *cq, struct ibv_wc *wc,
		  struct ibv_wc_tm_info *tm, int max, int min, int64_t spin_ns);
