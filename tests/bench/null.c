/*
 * A device that accepts every post and does nothing, for benchmarks of bindings.
 *
 * It replaces libibverbs: it has the control verbs needed to create a queue pair,
 * on a context with its own data verbs.  rdmapost loads it through
 * RDMAPOST_LIBIBVERBS; for a program that is linked with libibverbs, put it in
 * LD_PRELOAD.  Its symbols are unversioned, so that they match any version.
 *
 * A post walks the chain and counts it.  After null_remember(1) the CQ also
 * records what is posted, and polls return it in order, all successful; a CQ that was
 * asked for an event writes to its channel.  A channel serves one CQ.
 *
 * For tests of error messages, NULL_REFUSES in the environment names a control
 * verb and the errno with which it fails ("ibv_reg_mr=12"); NULL_PORT_STATE
 * and NULL_ACTIVE_SPEED_EX set attributes of the port.
 */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <infiniband/verbs.h>

#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#define RING (1u << 20)
#define MANY 0x40000000

/* Must come first: the header casts to it. */
struct null_cq {
	struct ibv_cq cq;
	int armed;
	uint32_t head, tail;
	struct ibv_wc *ring;
};

static int remember;
static int poll_error = -1;
static struct ibv_wc like;
static int alike;
static uint64_t posted;
static uint32_t last_number = 0x10;
static int failed_resets;

/* Whether later posts are recorded (1) or only counted (0). */
void null_remember(int on);
/* Sets the template of later completions, apart from wr_id; NULL restores the default. */
void null_complete_as(const struct ibv_wc *wc);
/* Polls fail with this errno from now on, unless it is negative. */
void null_fail_poll(int error);
/* How many work requests have been posted. */
uint64_t null_posted(void);
/* Does nothing; ibv_query_pkey calls it, so that a profiler can detect the call. */
void null_mark(void);

void null_remember(int on)
{
	remember = on;
}

void null_complete_as(const struct ibv_wc *wc)
{
	alike = wc != NULL;
	if (wc)
		like = *wc;
}

void null_fail_poll(int error)
{
	poll_error = error;
}

uint64_t null_posted(void)
{
	return posted;
}

void null_mark(void)
{
	__asm__ volatile("");
}

/* Return the errno with which a control verb must fail, and set errno to it, or 0. */
static int refuses(const char *call)
{
	const char *refusal = getenv("NULL_REFUSES");
	size_t length = strlen(call);

	if (!refusal || strncmp(refusal, call, length) || refusal[length] != '=')
		return 0;
	return errno = atoi(refusal + length + 1);
}

/* ---- data verbs ---------------------------------------------------------- */

static const enum ibv_wc_opcode completes_as[] = {
	[IBV_WR_RDMA_WRITE] = IBV_WC_RDMA_WRITE,
	[IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE,
	[IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ,
	[IBV_WR_ATOMIC_CMP_AND_SWP] = IBV_WC_COMP_SWAP,
	[IBV_WR_ATOMIC_FETCH_AND_ADD] = IBV_WC_FETCH_ADD,
	[IBV_WR_LOCAL_INV] = IBV_WC_LOCAL_INV,
	[IBV_WR_BIND_MW] = IBV_WC_BIND_MW,
	[IBV_WR_TSO] = IBV_WC_TSO,
};

static void complete(struct ibv_cq *cq, uint32_t qp_num, uint64_t wr_id,
		     enum ibv_wc_opcode opcode)
{
	struct null_cq *queue = (struct null_cq *)cq;
	struct ibv_wc *wc = &queue->ring[queue->head++ % RING];

	if (alike) {
		*wc = like;
	} else {
		memset(wc, 0, sizeof(*wc));
		wc->opcode = opcode;
		wc->qp_num = qp_num;
		wc->byte_len = 8;
	}
	wc->wr_id = wr_id;
	if (queue->armed) {
		queue->armed = 0;
		eventfd_write(cq->channel->fd, 1);
	}
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr,
		     struct ibv_send_wr **bad)
{
	(void)bad;
	for (; wr; wr = wr->next) {
		posted++;
		if (remember)
			complete(qp->send_cq, qp->qp_num, wr->wr_id,
				 completes_as[wr->opcode]);
	}
	return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr,
		     struct ibv_recv_wr **bad)
{
	(void)bad;
	for (; wr; wr = wr->next) {
		posted++;
		if (remember)
			complete(qp->recv_cq, qp->qp_num, wr->wr_id,
				 IBV_WC_RECV);
	}
	return 0;
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr,
			 struct ibv_recv_wr **bad)
{
	(void)srq, (void)bad;
	for (; wr; wr = wr->next)
		posted++;
	return 0;
}

static int post_srq_ops(struct ibv_srq *srq, struct ibv_ops_wr *op,
			struct ibv_ops_wr **bad)
{
	(void)srq, (void)bad;
	for (; op; op = op->next)
		posted++;
	return 0;
}

static int poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc)
{
	struct null_cq *queue = (struct null_cq *)cq;
	int n = 0;

	if (poll_error >= 0) {
		errno = poll_error;
		return -1;
	}
	while (n < num_entries && queue->tail != queue->head)
		wc[n++] = queue->ring[queue->tail++ % RING];
	return n;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	(void)solicited_only;
	((struct null_cq *)cq)->armed = cq->channel != NULL;
	return 0;
}

/* ---- device -------------------------------------------------------------- */

static struct ibv_device device = {
	.node_type = IBV_NODE_CA,
	.transport_type = IBV_TRANSPORT_IB,
	.name = "null0",
	.dev_name = "uverbs-null",
};

struct ibv_device **ibv_get_device_list(int *count)
{
	if (refuses("ibv_get_device_list"))
		return NULL;
	struct ibv_device **list = calloc(2, sizeof(*list));

	if (list)
		list[0] = &device;
	if (count)
		*count = list ? 1 : 0;
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

const char *ibv_get_device_name(struct ibv_device *of)
{
	return of->name;
}

__be64 ibv_get_device_guid(struct ibv_device *of)
{
	(void)of;
	return 1;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	if (refuses("ibv_query_device"))
		return errno;
	(void)context;
	memset(attr, 0, sizeof(*attr));
	attr->max_mr_size = UINT64_MAX;
	attr->device_cap_flags = IBV_DEVICE_MEM_WINDOW |
				 IBV_DEVICE_MEM_WINDOW_TYPE_2B;
	attr->max_qp = attr->max_cq = attr->max_mr = attr->max_pd = MANY;
	attr->max_srq = attr->max_mw = attr->max_ah = MANY;
	attr->max_qp_wr = attr->max_cqe = attr->max_srq_wr = MANY;
	attr->max_sge = attr->max_sge_rd = attr->max_srq_sge = 32;
	attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = 16;
	attr->atomic_cap = IBV_ATOMIC_HCA;
	attr->max_pkeys = 1;
	attr->phys_port_cnt = 1;
	return 0;
}

static int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
			   struct ibv_device_attr_ex *attr, size_t size)
{
	(void)input;
	memset(attr, 0, size);
	attr->tso_caps.max_tso = 1u << 18;
	attr->tso_caps.supported_qpts = 1u << IBV_QPT_UD;
	return ibv_query_device(context, &attr->orig_attr);
}

static int query_port(struct ibv_context *context, uint8_t port_num,
		      struct ibv_port_attr *attr, size_t size)
{
	struct ibv_port_attr found = {
		.state = IBV_PORT_ACTIVE, .max_mtu = IBV_MTU_4096,
		.active_mtu = IBV_MTU_4096, .gid_tbl_len = 1,
		.max_msg_sz = 1u << 31, .pkey_tbl_len = 1, .lid = 1,
		.active_width = 2, .active_speed = 32, .phys_state = 5,
		.link_layer = IBV_LINK_LAYER_INFINIBAND,
	};

	const char *state = getenv("NULL_PORT_STATE");
	const char *speed = getenv("NULL_ACTIVE_SPEED_EX");
	uint32_t active_speed_ex = speed ? (uint32_t)atoi(speed) : 0;

	(void)context;
	if (port_num != 1)
		return EINVAL;
	if (state)
		found.state = atoi(state);
	memset(attr, 0, size);
	memcpy(attr, &found, size < sizeof(found) ? size : sizeof(found));
	/* As libibverbs does since release 50. */
	if (size >= 56)
		memcpy((char *)attr + 52, &active_speed_ex, 4);
	return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port_num,
		   struct _compat_ibv_port_attr *attr)
{
	return query_port(context, port_num, (struct ibv_port_attr *)attr,
			  offsetof(struct ibv_port_attr, port_cap_flags2));
}

int ibv_query_gid(struct ibv_context *context, uint8_t port_num, int index,
		  union ibv_gid *gid)
{
	(void)context, (void)port_num;
	memset(gid, 0, sizeof(*gid));
	gid->raw[0] = 0xfe;
	gid->raw[1] = 0x80;
	gid->raw[15] = 1;
	return index ? -1 : 0;
}

int ibv_query_pkey(struct ibv_context *context, uint8_t port_num, int index,
		   __be16 *pkey)
{
	(void)context, (void)port_num;
	null_mark();
	*pkey = 0xffff;
	return index ? -1 : 0;
}

/* ---- resources ----------------------------------------------------------- */

#define MAKE(type, name, parent, from)                                        \
	type *name = calloc(1, sizeof(*name));                                \
	if (!name)                                                            \
		return NULL;                                                  \
	name->parent = from

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	if (refuses("ibv_alloc_pd"))
		return NULL;
	MAKE(struct ibv_pd, pd, context, context);
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	if (refuses("ibv_dealloc_pd"))
		return errno;
	free(pd);
	return 0;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length,
				uint64_t iova, unsigned int access)
{
	if (refuses("ibv_reg_mr"))
		return NULL;
	MAKE(struct ibv_mr, mr, context, pd->context);
	(void)iova, (void)access;
	mr->pd = pd;
	mr->addr = addr;
	mr->length = length;
	mr->lkey = mr->rkey = last_number++ << 8;
	return mr;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length,
			  int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr,
				(unsigned int)access);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	if (refuses("ibv_dereg_mr"))
		return errno;
	free(mr);
	return 0;
}

static struct ibv_mw *alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	MAKE(struct ibv_mw, mw, context, pd->context);
	mw->pd = pd;
	mw->type = type;
	mw->rkey = last_number++ << 8;
	return mw;
}

static int dealloc_mw(struct ibv_mw *mw)
{
	free(mw);
	return 0;
}

/* Must come first: the header casts to it. */
struct null_channel {
	struct ibv_comp_channel channel;
	struct ibv_cq *cq;
};

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	if (refuses("ibv_create_comp_channel"))
		return NULL;
	MAKE(struct null_channel, made, channel.context, context);
	made->channel.fd = eventfd(0, EFD_CLOEXEC);
	return &made->channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
	close(channel->fd);
	free(channel);
	return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe,
			     void *cq_context, struct ibv_comp_channel *channel,
			     int comp_vector)
{
	if (refuses("ibv_create_cq"))
		return NULL;
	struct null_cq *queue = calloc(1, sizeof(*queue));

	(void)comp_vector;
	/* Zeroed pages are allocated when first touched. */
	if (!queue || !(queue->ring = calloc(RING, sizeof(*queue->ring)))) {
		free(queue);
		return NULL;
	}
	queue->cq.context = context;
	queue->cq.cq_context = cq_context;
	queue->cq.channel = channel;
	queue->cq.cqe = cqe;
	if (channel)
		((struct null_channel *)channel)->cq = &queue->cq;
	return &queue->cq;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
	free(((struct null_cq *)cq)->ring);
	free(cq);
	return 0;
}

#ifndef OWN_CQ_EVENTS
int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
	eventfd_t counted;

	if (eventfd_read(channel->fd, &counted))
		return -1;
	*cq = ((struct null_channel *)channel)->cq;
	*cq_context = (*cq)->cq_context;
	return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
	(void)cq, (void)count;
}
#endif

static struct ibv_qp *create_qp_ex(struct ibv_context *context,
				   struct ibv_qp_init_attr_ex *init)
{
	if (refuses("ibv_create_qp"))
		return NULL;
	MAKE(struct ibv_qp, qp, context, context);
	qp->pd = init->pd;
	qp->send_cq = init->send_cq;
	qp->recv_cq = init->recv_cq;
	qp->srq = init->srq;
	qp->qp_type = init->qp_type;
	qp->state = IBV_QPS_RESET;
	qp->qp_num = last_number++;
	return qp;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
	struct ibv_qp_init_attr_ex ex = {0};

	/* The two structs have the same first members. */
	memcpy(&ex, init, sizeof(*init));
	ex.pd = pd;
	return create_qp_ex(pd->context, &ex);
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	if (refuses("ibv_modify_qp"))
		return errno;
	if (mask & IBV_QP_STATE) {
		const char *fail = getenv("NULL_RESETS_FAIL");

		qp->state = attr->qp_state;
		/* As Soft-RoCE does while it handles a request that fails. */
		if (qp->state == IBV_QPS_RESET && fail && failed_resets < atoi(fail)) {
			failed_resets++;
			qp->state = IBV_QPS_ERR;
		}
	}
	return 0;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask,
		 struct ibv_qp_init_attr *init)
{
	(void)mask;
	memset(attr, 0, sizeof(*attr));
	memset(init, 0, sizeof(*init));
	attr->qp_state = attr->cur_qp_state = qp->state;
	attr->path_mtu = IBV_MTU_4096;
	init->qp_type = qp->qp_type;
	return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
	free(qp);
	return 0;
}

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init)
{
	if (refuses("ibv_create_srq"))
		return NULL;
	MAKE(struct ibv_srq, srq, context, pd->context);
	(void)init;
	srq->pd = pd;
	return srq;
}

int ibv_destroy_srq(struct ibv_srq *srq)
{
	free(srq);
	return 0;
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	if (refuses("ibv_create_ah"))
		return NULL;
	MAKE(struct ibv_ah, ah, context, pd->context);
	(void)attr;
	ah->pd = pd;
	return ah;
}

int ibv_destroy_ah(struct ibv_ah *ah)
{
	free(ah);
	return 0;
}

struct ibv_context *ibv_open_device(struct ibv_device *of)
{
	if (refuses("ibv_open_device"))
		return NULL;
	struct verbs_context *verbs = calloc(1, sizeof(*verbs));

	if (!verbs)
		return NULL;
	verbs->sz = sizeof(*verbs);
	verbs->query_device_ex = getenv("NULL_TSO") ? query_device_ex : NULL;
	verbs->query_port = query_port;
	verbs->create_qp_ex = create_qp_ex;
	verbs->post_srq_ops = post_srq_ops;
	verbs->context.device = of;
	verbs->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
	verbs->context.cmd_fd = -1;
	verbs->context.num_comp_vectors = 1;
	verbs->context.async_fd = eventfd(0, EFD_CLOEXEC);
	verbs->context.ops.post_send = post_send;
	verbs->context.ops.post_recv = post_recv;
	verbs->context.ops.post_srq_recv = post_srq_recv;
	verbs->context.ops.poll_cq = poll_cq;
	verbs->context.ops.req_notify_cq = req_notify_cq;
	verbs->context.ops.alloc_mw = alloc_mw;
	verbs->context.ops.dealloc_mw = dealloc_mw;
	return &verbs->context;
}

int ibv_close_device(struct ibv_context *context)
{
	close(context->async_fd);
	free(verbs_get_ctx(context));
	return 0;
}
