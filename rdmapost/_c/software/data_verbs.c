/*
 * The soft device's data verbs: a context with our own operations.
 *
 * ibv_post_send() and the like (libibverbs/shim.c) call through qp->context->ops, so a context
 * created here receives exactly what a NIC's driver would. Such a context must never be passed to
 * exported libibverbs functions: they access private data that it lacks.
 *
 * Work requests are copied in full here, and executed in Python, or in fast_path.c.
 */
#include "software/device_queues.h"

enum posts { SENDS, RECEIVES, SRQ_RECEIVES, OPERATIONS };

/* Return a new reference to a queue of the object with this handle, or NULL if it has none. */
static struct device_queue *find_queue(uint32_t handle, enum rp_name name)
{
	PyObject *found = rp_soft_part(handle, name);

	if (found && !PyObject_TypeCheck(found, (PyTypeObject *)rp_device_queue_type))
		Py_CLEAR(found);
	return (struct device_queue *)found;
}

static int is_full(const struct device_queue *queue)
{
	return queue->used >= queue->depth;
}

/* ---- reading: these return 0 or an errno --------------------------------- */

static int read_sges(struct wqe *wqe, const struct ibv_sge *sge, int count, unsigned int max)
{
	/* A negative count converts to a huge one. */
	if ((unsigned int)count > max || (count && !sge))
		return EINVAL;
	wqe->num_sge = (unsigned int)count;
	if (wqe->num_sge <= RP_MAX_SGES) {
		for (int i = 0; i < count; i++)
			wqe->sge[i] = sge[i];
		return 0;
	}
	wqe->num_sge = RP_MAX_SGES + 1;
	wqe->sges = rp_tuple_of_sges(sge, (unsigned int)count);
	return wqe->sges ? 0 : ENOMEM;
}

static int read_inline(struct wqe *wqe, const struct ibv_send_wr *wr, unsigned int max)
{
	uint64_t size = 0;
	char *to;
	int code = 0;

	for (int i = 0; i < wr->num_sge; i++)
		size += wr->sg_list[i].length;
	if (size > max)
		return EINVAL;
	wqe->data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
	if (!wqe->data)
		return ENOMEM;
	to = PyBytes_AsString(wqe->data);
	for (int i = 0; !code && i < wr->num_sge; i++) {
		const struct ibv_sge *sge = &wr->sg_list[i];

		code = rp_soft_read(to, sge->addr, sge->length);
		to += sge->length;
	}
	return code;
}

static int read_send(struct wqe *wqe, const struct device_queue *queue, enum ibv_qp_type type,
		     const struct ibv_send_wr *wr)
{
	int code = read_sges(wqe, wr->sg_list, wr->num_sge, queue->max_sge);

	wqe->opcode = wr->opcode;
	wqe->flags = wr->send_flags;
	if (!code && wr->send_flags & IBV_SEND_INLINE)
		code = read_inline(wqe, wr, queue->max_inline);
	if (code)
		return code;
	if (wr->opcode == IBV_WR_BIND_MW) {
		if (!wr->bind_mw.mw || !wr->bind_mw.bind_info.mr)
			return EINVAL;
		wqe->window = rp_soft_part(wr->bind_mw.mw->handle, NAMES);
		wqe->region = rp_soft_part(wr->bind_mw.bind_info.mr->handle, NAMES);
		return wqe->window && wqe->region ? 0 : EINVAL;
	}
	if (type == IBV_QPT_UD && (wr->opcode == IBV_WR_SEND || wr->opcode == IBV_WR_TSO ||
				   wr->opcode == IBV_WR_SEND_WITH_IMM)) {
		wqe->ah = wr->wr.ud.ah ? rp_soft_part(wr->wr.ud.ah->handle, NAMES) : NULL;
		if (!wqe->ah)
			return EINVAL;
	}
	if (wr->opcode == IBV_WR_TSO) {
		if (wr->tso.hdr_sz > queue->max_tso_header || (wr->tso.hdr_sz && !wr->tso.hdr))
			return EINVAL;
		wqe->hdr = PyBytes_FromStringAndSize(wr->tso.hdr, wr->tso.hdr_sz);
		if (!wqe->hdr)
			return ENOMEM;
	}
	return 0;
}

/* TAG_ADD uses one of the list's slots and sets tm.handle; TAG_DEL must name such a handle. */
static int read_op(struct wqe *wqe, const struct device_queue *queue, struct ibv_ops_wr *op)
{
	struct device_queue *list = QUEUE(queue->slots);
	int adds = op->opcode == IBV_WR_TAG_ADD, code;

	wqe->opcode = op->opcode;
	wqe->flags = (unsigned int)op->flags;
	if (!list || !PyObject_TypeCheck((PyObject *)list, (PyTypeObject *)rp_device_queue_type))
		return EINVAL;
	if (adds && is_full(list))
		return ENOMEM;
	if (op->opcode == IBV_WR_TAG_DEL ? !op->tm.handle || op->tm.handle > list->last_handle :
					   !adds && op->opcode != IBV_WR_TAG_SYNC)
		return EINVAL;
	code = read_sges(wqe, op->tm.add.sg_list, adds ? op->tm.add.num_sge : 0, list->max_sge);
	if (adds && !code)
		wqe->wr.op.tm.handle = op->tm.handle = ++list->last_handle;
	return code;
}

/* ---- posting ------------------------------------------------------------- */

/* Queue a WQE and occupy its slots; 0 or an errno. */
static int put_in(struct device_queue *queue, struct wqe *wqe, int adds)
{
	if (rp_append(queue->pending, (PyObject *)wqe))
		return ENOMEM;
	queue->used++;
	/* An operation that adds an entry also occupies a slot in the matching list. */
	if (adds)
		QUEUE(queue->slots)->used++;
	return 0;
}

/* Create a WQE, or return NULL with an errno in *code, for instance if the queue is full. */
static struct wqe *new_wqe(const struct device_queue *queue, int *code)
{
	struct wqe *wqe;

	*code = rp_take_fault(queue->faults);
	if (!*code)
		*code = (int)queue->refuses;
	if (!*code && is_full(queue))
		*code = ENOMEM;
	if (*code)
		return NULL;
	wqe = (struct wqe *)PyType_GenericAlloc((PyTypeObject *)rp_wqe_type, 0);
	if (!wqe)
		*code = ENOMEM;
	PyErr_Clear();
	return wqe;
}

/* Accept one work request; 0 or an errno. */
static int accept_wr(enum posts what, enum ibv_qp_type type, struct device_queue *queue, void *wr)
{
	static const size_t sizes[] = { sizeof(struct ibv_send_wr), sizeof(struct ibv_recv_wr),
					sizeof(struct ibv_recv_wr), sizeof(struct ibv_ops_wr) };
	struct ibv_recv_wr *recv = wr;
	int code;
	struct wqe *wqe = new_wqe(queue, &code);

	if (!wqe)
		return code;
	memcpy(&wqe->wr, wr, sizes[what]);
	if (what == SENDS)
		code = read_send(wqe, queue, type, wr);
	else if (what == OPERATIONS)
		code = read_op(wqe, queue, wr);
	else
		code = read_sges(wqe, recv->sg_list, recv->num_sge, queue->max_sge);
	PyErr_Clear();
	if (!code)
		code = put_in(queue, wqe, what == OPERATIONS && wqe->opcode == IBV_WR_TAG_ADD);
	Py_DECREF((PyObject *)wqe);
	return code;
}

/*
 * A post is accepted without the device's lock, even in the middle of a verb. No Python code may
 * run while a post is being accepted, so that the device gets the posts in the order in which they
 * were recorded. The collector is therefore disabled, and re-enabled before any other code runs.
 * (Without a GIL, the collector does not run in the middle of C code, and the data lock keeps other
 * threads out.)
 */
struct quiet {
	PyGILState_STATE gil;
	int collects;
};

static struct quiet begin_quietly(void)
{
	struct quiet quiet = { .gil = PyGILState_Ensure() };

#ifndef Py_GIL_DISABLED
	quiet.collects = PyGC_Disable();
#endif
	return quiet;
}

static void end_quietly(struct quiet quiet)
{
	if (quiet.collects)
		PyGC_Enable();
	PyGILState_Release(quiet.gil);
}

/*
 * Returns 0, or an errno with the first refused work request in *bad. If bad is NULL, either all
 * work requests are accepted or none.
 */
static int post(enum posts what, uint32_t handle, enum ibv_qp_type type, void *wr, void **bad)
{
	static const enum rp_name names[] = { SQ, RQ, SRQ_QUEUE, OPS };
	struct quiet quiet = begin_quietly();
	struct device_queue *queue = find_queue(handle, names[what]);
	int code = queue ? 0 : EINVAL, accepted = 0;

	rp_data_lock();
	/* The work runs after the post, and is harmless if nothing was accepted. */
	if (queue && queue->prompt)
		code = rp_soft_start(handle);
	while (wr && !code) {
		code = accept_wr(what, type, queue, wr);
		/* All three structs have `next` at the same offset. */
		if (!code)
			wr = ((struct ibv_recv_wr *)wr)->next;
		accepted += !code;
	}
	for (; code && !bad && accepted; accepted--) {
		Py_XDECREF(PyObject_CallMethodObjArgs(queue->pending, rp_names[POP_LAST], NULL));
		queue->used--;
	}
	rp_data_unlock();
	Py_XDECREF((PyObject *)queue);
	end_quietly(quiet);
	if (code && bad)
		*bad = wr;
	return code;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
	return post(SENDS, qp->handle, qp->qp_type, wr, (void **)bad_wr);
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	return post(RECEIVES, qp->handle, 0, wr, (void **)bad_wr);
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	return post(SRQ_RECEIVES, srq->handle, 0, wr, (void **)bad_wr);
}

static int post_srq_ops(struct ibv_srq *srq, struct ibv_ops_wr *op, struct ibv_ops_wr **bad_op)
{
	return post(OPERATIONS, srq->handle, 0, op, (void **)bad_op);
}

/* A type 1 window gets a new rkey at once. */
static int bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	struct ibv_send_wr wr = { .wr_id = bind->wr_id, .opcode = IBV_WR_BIND_MW,
				  .send_flags = bind->send_flags };
	struct quiet quiet = begin_quietly();
	int code;

	wr.bind_mw.mw = mw;
	wr.bind_mw.bind_info = bind->bind_info;
	/* No other bind may read the rkey until this one has changed it. */
	rp_data_lock();
	wr.bind_mw.rkey = (mw->rkey & ~0xFFu) | ((mw->rkey + 1) & 0xFF);
	code = post(SENDS, qp->handle, qp->qp_type, &wr, NULL);
	if (!code)
		mw->rkey = wr.bind_mw.rkey;
	rp_data_unlock();
	end_quietly(quiet);
	return code;
}

/* ---- polling ------------------------------------------------------------ */

/*
 * A CQ entry is a tuple (bytes, work queue, number of slots it frees). The bytes are a struct ibv_wc
 * and a struct rp_wc_ex, which ends after the tag if the CQ has no timestamps.
 */
static void read_entry(PyObject *bytes, struct ibv_wc *wc, struct rp_wc_ex *more)
{
	const char *data = PyBytes_AsString(bytes);

	memcpy(wc, data, sizeof(*wc));
	if (more)
		memcpy(more, data + sizeof(*wc), (size_t)PyBytes_Size(bytes) - sizeof(*wc));
}

/* Whether an object is a CQ entry: Python code may find the deque through gc and add anything. */
static int is_entry(PyObject *object)
{
	PyObject *bytes;
	size_t size;

	if (!PyTuple_CheckExact(object) || PyTuple_Size(object) != 3 ||
	    !PyObject_TypeCheck(PyTuple_GetItem(object, 1), (PyTypeObject *)rp_device_queue_type) ||
	    !PyLong_CheckExact(PyTuple_GetItem(object, 2)))
		return 0;
	bytes = PyTuple_GetItem(object, 0);
	size = PyBytes_CheckExact(bytes) ? (size_t)PyBytes_Size(bytes) : 0;
	return size >= sizeof(struct ibv_wc) &&
	       size <= sizeof(struct ibv_wc) + sizeof(struct rp_wc_ex);
}

/* Count the completions that no verb in progress may still roll back. */
static Py_ssize_t count_entries(const struct device_queue *cq)
{
	/* Read `hidden` first: without the lock, the count may be too high, but never too low. */
	Py_ssize_t hidden = RP_LOAD(&cq->hidden);

	return PyObject_Size(cq->pending) - hidden;
}

/* Dequeue up to `max` completions; `more` may be NULL; -1 for an unknown CQ. */
static int poll(uint32_t handle, int max, struct ibv_wc *wc, struct rp_wc_ex *more)
{
	struct quiet quiet = begin_quietly();
	struct device_queue *cq = find_queue(handle, NAMES);
	int count = 0;

	if (!cq)
		max = 0;
	while (count < max) {
		PyObject *taken = NULL;
		int valid;

		rp_data_lock();
		if (count_entries(cq) > 0)
			taken = PyObject_CallMethodObjArgs(cq->pending, rp_names[POPLEFT], NULL);
		valid = taken && is_entry(taken);
		if (valid)
			QUEUE(PyTuple_GetItem(taken, 1))->used -=
				(unsigned int)PyLong_AsLong(PyTuple_GetItem(taken, 2));
		rp_data_unlock();
		if (!taken)
			break;
		if (valid) {
			read_entry(PyTuple_GetItem(taken, 0), wc + count, more ? more + count : NULL);
			count++;
		}
		Py_DECREF(taken);
	}
	PyErr_Clear();
	Py_XDECREF((PyObject *)cq);
	end_quietly(quiet);
	if (cq)
		return count;
	errno = EINVAL;
	return -1;
}

static int poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc)
{
	return poll(cq->handle, num_entries, wc, NULL);
}

static int req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	struct quiet quiet = begin_quietly();
	struct device_queue *found = find_queue(cq->handle, NAMES);
	unsigned int how = solicited_only ? ARMED_SOLICITED : ARMED_NEXT;

	rp_data_lock();
	/* A solicited-only request does not replace an earlier one that any entry satisfies. */
	if (found && how > found->armed)
		found->armed = how;
	rp_data_unlock();
	Py_XDECREF((PyObject *)found);
	end_quietly(quiet);
	return found ? 0 : EINVAL;
}

/* ---- a context ---------------------------------------------------------- */

struct ibv_context *rp_soft_context_init(struct verbs_context *whole)
{
	struct ibv_context *context = &whole->context;

	rp_progress = rp_soft_progress;
	whole->sz = sizeof(*whole);
	whole->post_srq_ops = post_srq_ops;
	context->abi_compat = __VERBS_ABI_IS_EXTENDED;
	context->cmd_fd = context->async_fd = -1;
	context->num_comp_vectors = 1;
	context->ops.post_send = post_send;
	context->ops.post_recv = post_recv;
	context->ops.post_srq_recv = post_srq_recv;
	context->ops.poll_cq = poll_cq;
	context->ops.req_notify_cq = req_notify_cq;
	context->ops.bind_mw = bind_mw;
	return context;
}

/* ---- an extended CQ ----------------------------------------------------- */

static struct rp_soft_cq_ex *to_soft(struct ibv_cq_ex *cq)
{
	return (struct rp_soft_cq_ex *)(void *)cq;
}

static int next_poll(struct ibv_cq_ex *cq)
{
	struct rp_soft_cq_ex *soft = to_soft(cq);
	int n = poll(ibv_cq_ex_to_cq(cq)->handle, 1, &soft->wc, &soft->more);

	if (n <= 0)
		return n ? EINVAL : ENOENT;
	cq->wr_id = soft->wc.wr_id;
	cq->status = soft->wc.status;
	return 0;
}

static int start_poll(struct ibv_cq_ex *cq, struct ibv_poll_cq_attr *attr)
{
	return attr && attr->comp_mask ? EINVAL : next_poll(cq);
}

static void end_poll(struct ibv_cq_ex *cq)
{
	(void)cq;
}

#define FIELDS(X)                                                                                \
	X(enum ibv_wc_opcode, opcode)                                                             \
	X(uint32_t, vendor_err)                                                                   \
	X(uint32_t, byte_len)                                                                     \
	X(__be32, imm_data)                                                                       \
	X(uint32_t, qp_num)                                                                       \
	X(uint32_t, src_qp)                                                                       \
	X(unsigned int, wc_flags)                                                                 \
	X(uint32_t, slid)                                                                         \
	X(uint8_t, sl)                                                                            \
	X(uint8_t, dlid_path_bits)
#define READ(type, field)                                                                         \
	static type read_##field(struct ibv_cq_ex *cq)                                            \
	{                                                                                         \
		return to_soft(cq)->wc.field;                                                     \
	}
#define SET(type, field) cq->cq.read_##field = read_##field;
FIELDS(READ)

static void read_tm_info(struct ibv_cq_ex *cq, struct ibv_wc_tm_info *tm_info)
{
	*tm_info = to_soft(cq)->more.tm;
}

static uint64_t read_completion_ts(struct ibv_cq_ex *cq)
{
	return to_soft(cq)->more.completion_ts;
}

static uint64_t read_completion_wallclock_ns(struct ibv_cq_ex *cq)
{
	return to_soft(cq)->more.completion_wallclock_ns;
}

void rp_soft_cq_ex_init(struct rp_soft_cq_ex *cq, uint64_t wc_flags)
{
	cq->cq.start_poll = start_poll;
	cq->cq.next_poll = next_poll;
	cq->cq.end_poll = end_poll;
	FIELDS(SET)
	if (wc_flags & IBV_WC_EX_WITH_TM_INFO)
		cq->cq.read_tm_info = read_tm_info;
	if (wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)
		cq->cq.read_completion_ts = read_completion_ts;
	if (wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
		cq->cq.read_completion_wallclock_ns = read_completion_wallclock_ns;
}

/* ---- a queue pair with send_ops_flags ------------------------------------ */

static void wr_start(struct ibv_qp_ex *qp)
{
	struct rp_soft_qp_ex *soft = (void *)qp;

	soft->first = soft->last = NULL;
	soft->code = 0;
}

/* Add a work request; NULL if out of memory. */
static struct rp_built_wr *add_wr(struct ibv_qp_ex *qp, int opcode, uint32_t rkey,
				  uint64_t remote_addr)
{
	struct rp_soft_qp_ex *soft = (void *)qp;
	struct ibv_send_wr *wr = calloc(1, sizeof(*wr));

	if (!wr) {
		soft->code = ENOMEM;
		return NULL;
	}
	wr->wr_id = qp->wr_id;
	wr->opcode = (enum ibv_wr_opcode)opcode;
	wr->send_flags = qp->wr_flags;
	wr->wr.rdma.remote_addr = remote_addr;
	wr->wr.rdma.rkey = rkey;
	*(soft->last ? &soft->last->next : &soft->first) = wr;
	soft->last = wr;
	return (void *)wr;
}

static void wr_atomic_write(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr,
			    const void *atomic_wr)
{
	struct rp_built_wr *wr = add_wr(qp, RP_WR_ATOMIC_WRITE, rkey, remote_addr);

	if (wr)
		memcpy(&wr->atomic_wr, atomic_wr, 8);
}

static void wr_flush(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, size_t len,
		     uint8_t type, uint8_t level)
{
	struct rp_built_wr *wr = add_wr(qp, RP_WR_FLUSH, rkey, remote_addr);

	if (!wr)
		return;
	wr->length = (uint32_t)len;
	wr->type = type;
	wr->level = level;
}

static void wr_set_xrc_srqn(struct ibv_qp_ex *qp, uint32_t remote_srqn)
{
	struct rp_soft_qp_ex *soft = (void *)qp;

	if (soft->last)
		soft->last->qp_type.xrc.remote_srqn = remote_srqn;
}

static int wr_complete(struct ibv_qp_ex *qp)
{
	struct rp_soft_qp_ex *soft = (void *)qp;
	int code = soft->code ? soft->code :
		   post(SENDS, soft->qp.handle, soft->qp.qp_type, soft->first, NULL);

	while (soft->first) {
		struct ibv_send_wr *next = soft->first->next;

		free(soft->first);
		soft->first = next;
	}
	return code;
}

struct ibv_qp *rp_soft_qp_ex_init(struct rp_soft_qp_ex *qp)
{
	struct ibv_qp_ex *ex = (void *)qp;

	ex->wr_start = wr_start;
	ex->wr_set_xrc_srqn = wr_set_xrc_srqn;
	ex->wr_complete = wr_complete;
	qp->ex.wr_atomic_write = wr_atomic_write;
	qp->ex.wr_flush = wr_flush;
	return &qp->qp;
}
