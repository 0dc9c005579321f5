/*
 * Control verbs that need more than a forwarder (shim.cdef.h says what each adds); loader.c
 * forwards all others. cffi releases the GIL around every call.
 */
#include "libibverbs/shim.h"

#undef ibv_reg_mr /* a macro that hides the function */

struct ibv_mr *rp_reg_mr(struct ibv_pd *pd, void *addr, size_t length,
			 unsigned int access)
{
	if (!pd) {
		errno = EINVAL;
		return NULL;
	}
	if (!(access & IBV_ACCESS_OPTIONAL_RANGE))
		return ibv_reg_mr(pd, addr, length, (int)access);
	return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, access);
}

struct ibv_cq *rp_create_cq(struct ibv_context *context, int cqe,
			    struct ibv_comp_channel *channel, int comp_vector)
{
	return ibv_create_cq(context, cqe, NULL, channel, comp_vector);
}

struct ibv_cq *rp_create_cq_ex(struct ibv_context *context, int cqe,
			       struct ibv_comp_channel *channel,
			       int comp_vector, uint64_t wc_flags)
{
	struct ibv_cq_init_attr_ex attr = {
		.cqe = (uint32_t)cqe,
		.channel = channel,
		.comp_vector = (uint32_t)comp_vector,
		.wc_flags = IBV_WC_STANDARD_FLAGS | wc_flags,
	};
	struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &attr);

	return cq ? ibv_cq_ex_to_cq(cq) : NULL;
}

int rp_query_rt_values(struct ibv_context *context, uint64_t *raw_clock)
{
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	int code;

	if (!context || !raw_clock)
		return EINVAL;
	code = ibv_query_rt_values_ex(context, &values);
	if (code)
		return code;
	*raw_clock = (uint64_t)values.raw_clock.tv_sec * 1000000000 + (uint64_t)values.raw_clock.tv_nsec;
	return values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK ? 0 : EOPNOTSUPP;
}

int rp_get_async_event(struct ibv_context *context,
		       struct ibv_async_event *event)
{
	int failed = ibv_get_async_event(context, event);

	/* Acknowledge at once: an object with an unacknowledged event cannot be destroyed. */
	if (!failed)
		ibv_ack_async_event(event);
	return failed;
}

int rp_query_port(struct ibv_context *context, uint8_t port_num,
		  struct ibv_port_attr *attr, uint32_t *active_speed_ex)
{
	/* The struct as of rdma-core 49; older headers do not have its last field. */
	union {
		struct ibv_port_attr attr;
		struct {
			unsigned char before[52];
			uint32_t active_speed_ex;
		} ex;
	} full = { .ex = { { 0 }, 0 } };
	struct verbs_context *extended;
	int error;

	_Static_assert(offsetof(struct ibv_port_attr, port_cap_flags2) == 48 &&
		       sizeof(struct ibv_port_attr) <= sizeof(full), "struct ibv_port_attr");
	if (!context || !attr || !active_speed_ex)
		return EINVAL;
	extended = verbs_get_ctx_op(context, query_port);
	if (extended)
		error = extended->query_port(context, port_num, &full.attr, sizeof(full));
	else
		error = ___ibv_query_port(context, port_num, &full.attr);
	*attr = full.attr;
	*active_speed_ex = full.ex.active_speed_ex;
	return error;
}

int rp_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	/* Drivers dereference every pointer, even the region's in a bind of length 0. */
	if (!qp || !mw || !bind || !bind->bind_info.mr)
		return EINVAL;
	if (!mw->context || mw->context != qp->context ||
	    mw->context != bind->bind_info.mr->context)
		return EINVAL;
	if (!mw->context->ops.bind_mw)
		return EOPNOTSUPP;
	return ibv_bind_mw(qp, mw, bind);
}
