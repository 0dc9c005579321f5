/* The shim's own calls, for C (shim.h includes this) and for cffi (build_ffi.py). */

/* ---- loader.c: libibverbs, opened at first use -------------------------- */

/*
 * Open the library at `path` and fill the table of functions. Returns 0 if it
 * is open (now or already), else -1 with the reason in `why`, of `size` bytes.
 * The library is never closed.
 */
int rp_load(const char *path, char *why, size_t size);

/* Whether the open library has this symbol (1) or not (0). */
int rp_has_symbol(const char *name);

/* ---- control_verbs.c: control verbs that need more than a forwarder ------ */

/* ibv_reg_mr, through ibv_reg_mr_iova2 where an optional access flag needs it. */
struct ibv_mr *rp_reg_mr(struct ibv_pd *pd, void *addr, size_t length,
			 unsigned int access);

/* ibv_create_cq without a cq_context. */
struct ibv_cq *rp_create_cq(struct ibv_context *context, int cqe,
			    struct ibv_comp_channel *channel, int comp_vector);

/* ibv_create_cq_ex for completions that also report what `wc_flags` adds to an ibv_wc. */
struct ibv_cq *rp_create_cq_ex(struct ibv_context *context, int cqe,
			       struct ibv_comp_channel *channel,
			       int comp_vector, uint64_t wc_flags);

/* ibv_query_rt_values_ex, for the raw clock. Returns 0 or an errno. */
int rp_query_rt_values(struct ibv_context *context, uint64_t *raw_clock);

/* ibv_get_async_event and ibv_ack_async_event in one call: no signal handler runs between them. */
int rp_get_async_event(struct ibv_context *context,
		       struct ibv_async_event *event);

/*
 * ibv_query_port, which the header hides behind a macro: fills the full struct, and stores the
 * field added in rdma-core 49.
 */
int rp_query_port(struct ibv_context *context, uint8_t port_num,
		  struct ibv_port_attr *attr, uint32_t *active_speed_ex);

/* ibv_bind_mw, which the header defines only as an inline function; no pointer may be NULL. */
int rp_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);

/* ---- posting/build_wr.c: work requests that only ibv_wr_*() posts ------------------ */

/*
 * A FLUSH or ATOMIC_WRITE, for which struct ibv_send_wr has no members. The members that an RDMA
 * write also uses are at the same offsets as in struct ibv_send_wr.
 */
struct rp_built_wr {
	uint64_t wr_id;
	struct ibv_send_wr *next;
	struct ibv_sge *sg_list;
	int num_sge;
	enum ibv_wr_opcode opcode;
	unsigned int send_flags;
	uint32_t imm_data;
	uint64_t remote_addr;
	uint32_t rkey;
	uint32_t length;
	uint64_t atomic_wr; /* the value */
	uint32_t type, level;
	uint32_t remote_srqn;
};

/* ---- poll_cq.c: polling -------------------------------------------------- */

/*
 * The extra fields of a completion from an extended CQ: a message's tag and sender's data; the
 * completion time; a packet's VLAN tag and the flow steering rule it matched.
 */
struct rp_wc_ex {
	struct ibv_wc_tm_info tm;
	uint64_t completion_ts;
	uint64_t completion_wallclock_ns;
	uint32_t flow_tag;
	uint16_t cvlan;
};

/*
 * Poll up to `max` completions into `wc`, spinning for at most `spin_ns` nanoseconds to get at
 * least `min`. Returns the number polled, or -1 with errno set. For an extended CQ, `more` is as
 * long as `wc`, and fields that the CQ does not report are set to 0, as pkey_index always is; for
 * any other, `more` is NULL.
 */
int rp_poll_cq(struct ibv_cq *cq, struct ibv_wc *wc, struct rp_wc_ex *more, int max, int min,
	       int64_t spin_ns);
